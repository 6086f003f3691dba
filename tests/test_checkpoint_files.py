"""What the files of a checkpoint are: data that runs nothing, leads nowhere else, and is as it was written."""

from __future__ import annotations

import collections
import json
import math
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from runtime.checkpoint import CheckpointManager
from runtime.checkpoint import checked_blocks as blocks
from runtime.checkpoint import lock as locks
from runtime.checkpoint.folder_storage import StoredCheckpoint
from runtime.checkpoint.lock import lock
from runtime.checkpoint.plain import decode, encode
from runtime.checkpoint.rectangles_of_tensors import Content, Piece, SavePieces
from tests.checkpoint_cases import Pieces, state_is_right, trained_once, whole_pieces


class Intruder:
    """Runs code where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def saved(directory: Path, **options: Any) -> Path:
    model = Pieces(whole_pieces())
    return CheckpointManager(directory).save(model, trained_once(model), step=1, **options)


def test_files_are_json_and_safetensors(tmp_path: Path) -> None:
    folder = CheckpointManager(tmp_path).save(Pieces(whole_pieces()), step=1, extra={"best": 0.5})
    names = ["checkpoint.json", "metadata.json", "rank-00000.json", "rank-00000.safetensors"]
    assert sorted(entry.name for entry in folder.iterdir()) == names
    tensors = safetensors.torch.load_file(folder / "rank-00000.safetensors")
    assert torch.equal(tensors["model/layers.0.weight[0,0]"], Pieces(whole_pieces()).parameters["layers.0.weight"])
    assert json.loads((folder / "rank-00000.json").read_text())["training/extra"] == {"best": 0.5}


PLAIN: tuple[Any, ...] = (
    None, True, 3, -(2**70), 0.1, math.inf, "text\n\x1b\ud800", b"\x00\xff", [], {}, (), (1, (2, [3])), {1, 2},
    {"a": {"b": [1, {"c": None}]}}, {1: "one", (1, 2): "pair", None: 0}, {"$tuple": [1]}, {"$x": 1},
    collections.Counter({3: 2}), collections.OrderedDict([("z", 1), ("a", 2)]), torch.Size((2, 3)),
)  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    encoded = encode(value, where="extra")
    again = decode(json.loads(encoded.text), encoded.tensors)
    assert again == value and isinstance(again, (type(value), tuple))


def test_numbers_arrays_and_tensors_come_back(tmp_path: Path) -> None:
    extra = {
        "nan": math.nan,
        "numpy": np.float32(0.5),
        "array": np.arange(6.0).reshape(2, 3),
        "flag": torch.tensor(True),
    }
    saved(tmp_path, extra=(extra, torch.arange(3, dtype=torch.bfloat16)), data={"position": 7})
    loaded = CheckpointManager(tmp_path).load(Pieces(whole_pieces()))
    notes, tensor = loaded.extra
    assert math.isnan(notes["nan"]) and notes["numpy"] == 0.5 and loaded.data == {"position": 7}
    assert np.array_equal(notes["array"], extra["array"]) and notes["array"].dtype == np.float64
    assert torch.equal(notes["flag"], torch.tensor(True)) and torch.equal(tensor, torch.arange(3, dtype=torch.bfloat16))


def cyclic() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: Intruder(path), r"extra is a .*Intruder: only plain data"),
        (lambda path: {"a": [1, Intruder(path)]}, r"extra\['a'\]\[1\] is a .*Intruder"),
        (lambda path: path, r"extra is a pathlib\.PosixPath"),
        (lambda path: print, r"extra is a builtins\.builtin_function_or_method"),
        (lambda path: cyclic(), "contains itself"),
    ],
)
def test_what_is_not_plain_data_is_refused_when_it_is_saved(
    tmp_path: Path, make: Callable[[Path], Any], reason: str
) -> None:
    for asynchronous in (False, True):
        manager = CheckpointManager(tmp_path / "run", asynchronous=asynchronous)
        with pytest.raises(ValueError, match=reason):
            manager.save(Pieces(whole_pieces()), step=1, extra=make(tmp_path / "ran"))
        assert manager.latest() is None and not (tmp_path / "ran").exists()


def test_a_pickle_that_somebody_put_there_is_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    attack = pickle.dumps(Intruder(tmp_path / "ran"))
    (folder / ".metadata").write_bytes(attack)
    CheckpointManager(tmp_path).load(Pieces(whole_pieces()))
    for name in ("metadata.json", "rank-00000.json", "checkpoint.json"):
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(attack)
        with pytest.raises(ValueError, match="damaged"):
            CheckpointManager(tmp_path).load(Pieces(whole_pieces()))
        (folder / name).write_bytes(original)
    assert not (tmp_path / "ran").exists()


class _OldPieces(SavePieces):
    """As versions before 2 saved: objects are pickled."""

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        return value if isinstance(value, torch.Tensor) else self.transform_object(write_item, value)


def old_checkpoint(directory: Path, extra: Any) -> None:
    """What version 1 wrote: DCP's files."""
    folder = directory / "step-00000001"
    model = Pieces(whole_pieces())
    model.fill(seed=3)
    content: Content = {f"model/{o.name}": Piece(o.tensor.detach(), o.shape, o.offsets) for o in model.owned()}
    from runtime.checkpoint.rng import program_state, random_states

    content["random/0"] = random_states()
    fields = {"optimizer": None, "groups": [], "scheduler": None, "program_random": program_state(), "data": None}
    content["training"] = {"step": 1, **fields, "extra": extra}
    writer = dcp.FileSystemWriter(folder)
    dcp.save(content, storage_writer=writer, planner=_OldPieces(), no_dist=True)
    sizes = {entry.name: entry.stat().st_size for entry in folder.iterdir()}
    manifest = {"format": "meshwright-checkpoint", "version": 1, "step": 1, "files": sizes}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    (directory / "latest").write_text("step-00000001\n")


def test_checkpoints_of_earlier_versions_load_for_those_who_trust_them(tmp_path: Path) -> None:
    old_checkpoint(tmp_path / "good", {"best": 1})
    old_checkpoint(tmp_path / "bad", Intruder(tmp_path / "ran"))
    for name in ("good", "bad"):
        with pytest.raises(ValueError, match=r"earlier version.*may run code.*trust=True"):
            CheckpointManager(tmp_path / name).load(Pieces(whole_pieces()))
    assert not (tmp_path / "ran").exists()
    manager, model = CheckpointManager(tmp_path / "good"), Pieces(whole_pieces(), seed=None)
    assert manager.load(model, trust=True).extra == {"best": 1} and model.holds(seed=3)
    manager.save(model, step=2)
    assert manager.load(Pieces(whole_pieces())).step == 2


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97])
@pytest.mark.parametrize("name", ["checkpoint.json", "metadata.json", "rank-00000.json", "rank-00000.safetensors"])
def test_one_flipped_bit_is_noticed(tmp_path: Path, name: str, share: float) -> None:
    file = saved(tmp_path) / name
    content = bytearray(file.read_bytes())
    place = int(share * len(content))
    while name.endswith(".json") and not chr(content[place]).isalnum():
        place += 1
    content[place] ^= 1
    file.write_bytes(content)
    model = Pieces(whole_pieces(), seed=3)
    optimizer = trained_once(model)
    with pytest.raises(ValueError, match=rf"{name} (is damaged|cannot be read|is missing)|damaged: .*{name}"):
        CheckpointManager(tmp_path).load(model, optimizer)


def test_a_reader_reads_the_blocks_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor of twelve blocks a rank that holds a sixth reads two or three."""
    monkeypatch.setattr(blocks, "BLOCK", 4096)
    monkeypatch.setattr("runtime.checkpoint.metadata.BLOCK", 4096)
    whole = torch.arange(12 * 1024, dtype=torch.float32).reshape(96, 128)
    from runtime.checkpoint import directory
    from runtime.checkpoint.folder_storage import write

    name = directory.start(tmp_path, 1)
    pieces: Content = {"w": Piece(whole, (96, 128), (0, 0))}
    write(pieces, tmp_path, name, {}, keep_last=None, group=None, asynchronous=False)
    read: list[int] = []
    exactly = blocks.read_exactly
    monkeypatch.setattr(blocks, "read_exactly", lambda fd, to, at: (read.append(len(to)), exactly(fd, to, at)))
    part = Piece(torch.zeros(16, 128), (96, 128), (40, 0))
    StoredCheckpoint(tmp_path / name).read({"w": part})
    assert torch.equal(part.tensor, whole[40:56]) and len(read) <= 3
    columns = Piece(torch.zeros(96, 3), (96, 128), (0, 5))
    StoredCheckpoint(tmp_path / name).read({"w": columns})
    assert torch.equal(columns.tensor, whole[:, 5:8])


def test_numbers_of_an_optimizer_keep_their_precision(tmp_path: Path) -> None:
    model = Pieces(whole_pieces())
    optimizer = trained_once(model)
    for state in optimizer.state.values():
        state["beta"] = 0.1
    CheckpointManager(tmp_path).save(model, optimizer, step=1)
    CheckpointManager(tmp_path).load(model, optimizer)
    assert state_is_right(model, optimizer) and {state["beta"] for state in optimizer.state.values()} == {0.1}


@pytest.mark.parametrize("pointer", ["../outside", "/etc", "step-1/../../outside", "..", "step-x", "\x1b[31m"])
def test_the_pointer_leads_into_the_directory_alone(tmp_path: Path, pointer: str) -> None:
    saved(tmp_path / "outside")
    saved(tmp_path / "run")
    (tmp_path / "run" / "latest").write_text(pointer + "\n")
    with pytest.raises(ValueError, match="not the name of a checkpoint") as caught:
        CheckpointManager(tmp_path / "run").load(Pieces(whole_pieces()))
    assert str(caught.value).isprintable()


def test_names_of_files_lead_into_the_checkpoint_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for name in ("checkpoint.json", "metadata.json"):
        original = (folder / name).read_text()
        (folder / name).write_text(original.replace("rank-00000.safetensors", "../secret.safetensors"))
        with pytest.raises(ValueError, match=r"is damaged|not the name of a file"):
            CheckpointManager(tmp_path).load(Pieces(whole_pieces()))
        if name == "metadata.json":
            with pytest.raises(ValueError, match="not the name of a file in the checkpoint"):
                StoredCheckpoint(folder)
        (folder / name).write_text(original)


@contextmanager
def another_process(directory: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that saves into a directory, and then lives until the end of the block."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        lock(directory)
        theirs.send("locked")
        theirs.recv()
        os._exit(0)

    process = context.Process(target=work)
    process.start()
    assert ours.recv() == "locked"
    try:
        yield process
    finally:
        ours.send("end")
        process.join()


def test_two_jobs_do_not_save_into_one_directory(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    unfinished = tmp_path / ".unfinished-step-00000001"
    with another_process(tmp_path) as other:
        unfinished.mkdir()
        with pytest.raises(
            ValueError, match=rf"in use: process {other.pid} on .*a directory of its own.*remove"
        ) as caught:
            manager.save(Pieces(whole_pieces()), step=2)
        assert unfinished.exists() and str(tmp_path / ".lock") in str(caught.value)
    manager.save(Pieces(whole_pieces()), step=2)
    manager.save(Pieces(whole_pieces()), step=3)
    assert manager.steps() == (2, 3)


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    with another_process(tmp_path) as other:
        other.kill()
        other.join()
        lock(tmp_path)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("owner", "free"),
    [
        ({"host": "elsewhere", "pid": 1, "started": "1", "job": ""}, False),
        ({"host": "elsewhere", "pid": 1, "started": "1", "job": "SLURM_JOB_ID=7"}, True),
        ({"host": socket.gethostname(), "pid": os.getppid(), "started": "another", "job": ""}, True),
        ({"host": socket.gethostname(), "pid": os.getppid(), "started": None, "job": ""}, False),
        ({"host": socket.gethostname(), "pid": 2**22 + 1, "started": "1", "job": ""}, True),
        ({}, True),
    ],
)
def test_where_a_file_system_has_no_locks_the_file_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: dict[str, Any], free: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    if owner and owner["started"] is None:
        owner = {**owner, "started": locks._started(owner["pid"])}
    (tmp_path / ".lock").write_text(json.dumps(owner))
    if free:
        lock(tmp_path)
        lock(tmp_path)
        (tmp_path / ".lock").unlink()
        lock(tmp_path)
    else:
        with pytest.raises(ValueError, match="is in use"):
            lock(tmp_path)
