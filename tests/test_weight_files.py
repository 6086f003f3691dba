"""Safetensors files in one process: rectangles, names, dtypes, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import planner
from runtime.state.owned import Owned
from runtime.weight_files import load_weights, save_weights
from runtime.weight_files.find_files import model_names
from runtime.weight_files.rectangles import runs
from tests.small_models import Mlp, TiedClassifier, seeded, squared_error, token_batch


def piece(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
    *,
    aliases: tuple[str, ...] = (),
    persistent: bool = True,
) -> Owned:
    return Owned(
        name=name,
        aliases=aliases,
        tensor=tensor,
        shape=tuple(tensor.shape) if shape is None else shape,
        offsets=(0,) * tensor.dim() if offsets is None else offsets,
        kind="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
        trainable=tensor.requires_grad,
        persistent=persistent,
        primary=True,
    )


def whole_of(model: nn.Module) -> list[Owned]:
    return list(planner.compile(model, "dp=1").owned())


rectangles = st.lists(st.integers(1, 5), min_size=0, max_size=4).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        st.tuples(*(st.integers(0, size) for size in shape)),
        st.tuples(*(st.integers(0, size) for size in shape)),
    )
)


@given(rectangles)
def test_runs_cover_a_rectangle_in_its_order(case: tuple[tuple[int, ...], ...]) -> None:
    shape, first, second = case
    offsets = tuple(min(pair) for pair in zip(first, second))
    sizes = tuple(abs(one - other) for one, other in zip(first, second))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
    length, starts = runs(shape, offsets, sizes)
    elements = [element for start in starts for element in range(start, start + length)]
    assert elements == part.flatten().tolist()


@settings(max_examples=25)
@given(rectangles, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_any_rectangle_is_read_and_only_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    shape, first, second = case
    offsets = tuple(min(pair) for pair in zip(first, second))
    sizes = tuple(abs(one - other) for one, other in zip(first, second))
    file = tmp_path_factory.mktemp("files") / "model.safetensors"
    whole = torch.randn(shape, dtype=torch.float32)
    save_file({"x": whole}, file)
    local = nn.Parameter(torch.zeros(sizes, dtype=dtype))
    loaded = load_weights([piece("x", local, shape, offsets)], file, names=["x"])
    expected = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
    assert torch.equal(local.detach(), expected.to(dtype))
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert loaded.bytes_read == header + expected.numel() * 4


def test_pieces_on_meta_get_memory_and_stay_the_same_objects(tmp_path: Path) -> None:
    save_file({"x": torch.arange(6.0).reshape(2, 3)}, tmp_path / "model.safetensors")
    parameter = nn.Parameter(torch.empty(1, 3, device="meta"))
    held = [parameter]
    load_weights([piece("x", parameter, (2, 3), (1, 0))], tmp_path, names=["x"])
    assert held[0] is parameter and isinstance(parameter, nn.Parameter) and parameter.requires_grad
    assert parameter.tolist() == [[3.0, 4.0, 5.0]]


@pytest.mark.parametrize("max_file_bytes", [1, 2000, 10**9])
def test_what_is_saved_is_the_state_dict(tmp_path: Path, max_file_bytes: int) -> None:
    model = seeded(TiedClassifier)
    files = save_weights(whole_of(model), tmp_path, max_file_bytes=max_file_bytes)
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored.update(load_file(file))
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    state = model.state_dict()
    assert stored.keys() == state.keys() - {"output.weight"}  # tied to the embedding
    assert all(torch.equal(stored[name], state[name]) for name in stored)
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == stored.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_another_save_leaves_no_files_of_the_first(tmp_path: Path) -> None:
    model = seeded(TiedClassifier)
    save_weights(whole_of(model), tmp_path, max_file_bytes=1)
    save_weights(whole_of(model), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_dtype_is_given_to_floating_tensors_only(tmp_path: Path) -> None:
    owned = [piece("x", torch.ones(3)), piece("n", torch.arange(3)), piece("flag", torch.tensor([True]))]
    save_weights(owned, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert [stored[name].dtype for name in ("x", "n", "flag")] == [torch.bfloat16, torch.int64, torch.bool]


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.complex64]
    owned = [piece(str(dtype), torch.randn(3, 2).abs().to(dtype)) for dtype in (*dtypes, torch.float8_e4m3fn)]
    save_weights(owned, tmp_path)
    again = [piece(one.name, torch.empty_like(one.tensor)) for one in owned]
    load_weights(again, tmp_path, names=[one.name for one in owned])
    stored = load_file(tmp_path / "model.safetensors")
    for one, other in zip(owned, again):
        assert torch.equal(one.tensor.view(torch.uint8), other.tensor.view(torch.uint8))
        assert torch.equal(one.tensor.view(torch.uint8), stored[one.name].view(torch.uint8))


@pytest.mark.parametrize("stored", [("embedding.weight",), ("output.weight",), ("embedding.weight", "output.weight")])
def test_tied_weights_are_found_under_any_of_their_names(tmp_path: Path, stored: tuple[str, ...]) -> None:
    model = seeded(TiedClassifier)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tied = {"embedding.weight", "output.weight"}
    save_file({name: state[name] for name in state if name not in tied or name in stored}, tmp_path / "w.safetensors")
    other = TiedClassifier().double()
    parallel = planner.compile(other, "dp=1")
    parallel.load_pretrained(tmp_path)
    assert all(torch.equal(tensor, state[name]) for name, tensor in parallel.full_state_dict().items())


def test_names_and_prefixes() -> None:
    model = {"model.embed.weight", "model.layers.0.up.weight", "head.weight"}
    base = {"embed.weight", "layers.0.up.weight"}
    assert model_names(base, model) == {name: f"model.{name}" for name in base}
    assert model_names(model, base)["model.embed.weight"] == "embed.weight"
    assert model_names(model, base)["head.weight"] == "head.weight"
    assert model_names(base, model, prefix="transformer") == {name: name for name in base}
    # Two prefixes would do: names stay as they are.
    two = {"encoder.weight", "decoder.weight"}
    assert model_names({"weight"}, two) == {"weight": "weight"}


def refused(error: str, tmp_path: Path, state: dict[str, torch.Tensor], **arguments: Any) -> None:
    local = nn.Parameter(torch.zeros(2, 3))
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=error):
        load_weights([piece("x", local), piece("y", torch.zeros(1))], tmp_path, names=["x", "y"], **arguments)
    assert not local.any()


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    x, y = torch.ones(2, 3), torch.ones(1)
    refused(r"'x' has shape \[3, 2\] .* but \[2, 3\]", tmp_path, {"x": x.T.contiguous(), "y": y})
    refused("missing 'y', unexpected 'z'", tmp_path, {"x": x, "z": y})
    refused("missing 'y', unexpected none", tmp_path, {"x": x})
    refused("cannot become", tmp_path, {"x": x.long(), "y": y})


def test_without_strict_what_fits_is_taken(tmp_path: Path) -> None:
    local = nn.Parameter(torch.zeros(2, 3))
    save_file({"x": torch.ones(2, 3), "z": torch.ones(1)}, tmp_path / "model.safetensors")
    loaded = load_weights([piece("x", local), piece("y", torch.zeros(1))], tmp_path, names=["x", "y"], strict=False)
    assert loaded.missing == ("y",) and loaded.unexpected == ("z",) and local.detach().all()


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    owned = [piece("x", torch.zeros(100))]
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(100)}, file)
    content = file.read_bytes()
    for damaged in (content[:-1], content[:40], content[:3], b"", b"PK\x03\x04" + content, b"\xff" * 200):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"cut short|not a safetensors file"):
            load_weights(owned, tmp_path, names=["x"])
    file.unlink()
    with pytest.raises(ValueError, match="no safetensors files"):
        load_weights(owned, tmp_path, names=["x"])
    with pytest.raises(ValueError, match="there is no"):
        load_weights(owned, file, names=["x"])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(ValueError, match=r"not there: gone\.safetensors"):
        load_weights(owned, tmp_path, names=["x"])
    for name in "ab":
        save_file({"x": torch.ones(100)}, tmp_path / f"{name}.safetensors")
    index.unlink()
    with pytest.raises(ValueError, match="several"):
        load_weights(owned, tmp_path, names=["x"])


def test_an_untouched_model_on_meta_is_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        parallel = planner.compile(Mlp(), "dp=1", loss_fn=squared_error)
    with pytest.raises(ValueError, match="meta device"):
        parallel.save_pretrained(tmp_path)


def test_pieces_that_leave_a_hole_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 elements of 'x', which has 6"):
        save_weights([piece("x", torch.ones(3), (6,), (0,))], tmp_path)


def test_two_dims_cut_unevenly_and_empty_pieces_make_one_file(tmp_path: Path) -> None:
    whole = torch.randn(5, 7, 2)
    rows, columns = [(0, 3), (3, 5), (5, 5)], [(0, 2), (2, 2), (2, 7)]
    owned = [
        piece("x", whole[top:bottom, left:right].clone(), (5, 7, 2), (top, left, 0))
        for (top, bottom), (left, right) in itertools.product(rows, columns)
    ]
    save_weights(owned, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], whole)


def test_batches_run_after_loading_on_meta(tmp_path: Path) -> None:
    model = seeded(TiedClassifier)
    planner.compile(model, "dp=1").save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = TiedClassifier().double()
    parallel = planner.compile(empty, "dp=1", example_inputs=token_batch())
    parallel.load_pretrained(tmp_path)
    loss, expected = (module(**token_batch())["loss"] for module in (parallel, model))
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0.0)
