"""Files as strangers leave them: what cannot be read is refused in one line, what is written harms nothing else."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cost_models import Cluster
from cost_models.files import check_writable, write_text
from cost_models.presets import load_preset
from passes.plan import Plan
from planner.library import load_config
from runtime.weight_files.find_files import files_by_name
from runtime.weight_files.format import read_header

DEEP = 100_000
READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": Plan.load,
    "cluster.toml": Cluster.from_toml,
    "config.json": load_config,
    "model.safetensors.index.json": files_by_name,
}
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "not UTF-8": b'{"version": "\xff\xfe"}',
    "nested too deep": b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "nested too deep in TOML": b"a = " + b"[" * DEEP + b"]" * DEEP,
    "one name twice": b'{"version": 2, "version": 3}',
    "a number of many digits": b'{"version": ' + b"9" * 5000 + b"}",
    "a list": b"[1, 2]",
    "a control character": b'{"\x1b[31m": 1}',
    "zeros": bytes(100),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_bytes(CONTENTS[content])
    with pytest.raises(ValueError, match=name) as caught:
        READERS[name](file)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / name
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match=r"a pipe|unknown model|another"):
        READERS[name](pipe)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).mkdir()
    with pytest.raises(ValueError, match=r"(?i)is a directory|unknown model|no safetensors files"):
        READERS[name](tmp_path / "folder" / name)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e400", "9" * 400])
@pytest.mark.parametrize("field", ["latency", "bandwidth", "memory_bytes", "float32", "size", "launch_overhead"])
def test_numbers_of_a_cluster_are_finite(tmp_path: Path, field: str, number: str) -> None:
    file = tmp_path / "cluster.toml"
    sizes = {"latency": "1e-6", "bandwidth": "1e9", "memory_bytes": "1e9", "float32": "1e12", "size": "2"}
    sizes |= {"launch_overhead": "1e-6", field: number}
    file.write_text(
        f'name = "c"\n[device]\nname = "d"\nmemory_bytes = {sizes["memory_bytes"]}\nmemory_bandwidth = 1e9\n'
        f"launch_overhead = {sizes['launch_overhead']}\n[device.flops]\nfloat32 = {sizes['float32']}\n"
        f'[[levels]]\nname = "l"\nsize = {sizes["size"]}\nlatency = {sizes["latency"]}\n'
        f"bandwidth = {sizes['bandwidth']}\n",
        encoding="utf-8",
    )
    with pytest.raises(ValueError, match=rf"{field} must be a finite number"):
        Cluster.from_toml(file)


def test_names_in_a_cluster_are_printable() -> None:
    data = load_preset("cpu-local")
    with pytest.raises(ValueError, match=r"name must be one line of printable characters, got '\\x1b\[31mred'"):
        Cluster.from_dict({**data, "name": "\x1b[31mred"})


@pytest.mark.parametrize(
    "elsewhere", ["../secret.safetensors", "/etc/passwd", "a/../../b", "sub/x.safetensors", "..", ""]
)
def test_an_index_leads_to_files_beside_it_alone(tmp_path: Path, elsewhere: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"")
    index = tmp_path / "set" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": elsewhere}}), encoding="utf-8")
    with pytest.raises(ValueError, match="not the name of a file beside it"):
        files_by_name(index)


def header(entries: Any) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    "entries",
    [
        b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"w": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [10**400], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]}},
        {"w": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
        {"w": 3},
        [1],
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "w": 1}',
    ],
)
def test_headers_of_safetensors_files(tmp_path: Path, entries: Any) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(header(entries))
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file") as caught:
        read_header(file)
    assert len(str(caught.value)) < 1000


def test_a_file_is_written_where_its_link_leads_and_keeps_its_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_text("before", encoding="utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    write_text(link, "after")
    assert link.is_symlink() and target.read_text(encoding="utf-8") == "after"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [entry.name for entry in target.parent.iterdir()] == ["target"]
    (tmp_path / "dangling").symlink_to(tmp_path / "folder" / "new")
    write_text(tmp_path / "dangling", "new")
    assert (tmp_path / "folder" / "new").read_text(encoding="utf-8") == "new"


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/full")
    for path, what in (("pipe", "a pipe"), (".", "a directory"), ("link", "a device"), ("/dev/full", "a device")):
        with pytest.raises(ValueError, match=what):
            check_writable(tmp_path / path)
        with pytest.raises(ValueError, match=what):
            write_text(tmp_path / path, "text")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode) and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_where_a_plan_goes_is_checked_before_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner import planning
    from planner.cli import main

    monkeypatch.setattr(planning, "plan", lambda *_, **__: pytest.fail("planned first"))
    for path in ("/dev/full", tmp_path / "nowhere" / "plan.json", tmp_path):
        arguments = ["plan", "tiny-llama", "--mesh", "tp=2", "--global-batch", "4", "--seq-len", "8", "-o", str(path)]
        assert main(arguments) == 2


def test_weights_are_saved_through_links_and_never_in_the_place_of_a_device(tmp_path: Path) -> None:
    from runtime.weight_files import save_weights
    from tests.checkpoint_cases import Pieces, whole_pieces

    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").symlink_to(tmp_path / "disk" / "weights")
    save_weights(Pieces(whole_pieces()).owned(), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_symlink()
    stored, _ = read_header(tmp_path / "disk" / "weights")
    assert stored["layers.0.weight"].dtype == torch.float32
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(ValueError, match="it is a device"):
        save_weights(Pieces(whole_pieces()).owned(), tmp_path / "device")


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "plan.json").write_text("before")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "plan.json", "after")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "before"
