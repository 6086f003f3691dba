"""The house is as ``docs/architecture.md`` draws it: layers, rooms, names, and the way of a model through them."""

from __future__ import annotations

import re
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import networkx

import planner
from tests.rooms import LAYERS, ROOT, contents_of, module_of, room_of, rooms_and_imports, sources
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

PAGE = ROOT / "docs" / "architecture.md"


def test_imports_go_down() -> None:
    up = [
        (module_of(path), name)
        for path in sources()
        for name in contents_of(path).anywhere
        if LAYERS.index(name.split(".")[0]) < LAYERS.index(module_of(path).split(".")[0])
    ]
    assert up == []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert list(networkx.simple_cycles(rooms_and_imports())) == []


def test_the_picture_is_what_rooms_import() -> None:
    drawn = set(re.findall(r"^ *([\w.]+) --> ([\w.]+)$", PAGE.read_text(), flags=re.M))
    assert drawn == set(networkx.transitive_reduction(rooms_and_imports()).edges)


def test_no_name_of_a_file_or_class_stands_for_two_things() -> None:
    files, classes = defaultdict(list), defaultdict(list)
    for path in sources():
        if path.name != "__init__.py":
            files[path.name].append(path)
        for name in contents_of(path).classes:
            classes[name].append(path)
    assert {name: where for name, where in {**files, **classes}.items() if len(where) > 1} == {}


def test_files_are_read_in_one_sitting() -> None:
    lengths = {module_of(path): len(path.read_text().splitlines()) for path in sources()}
    assert max(lengths.values()) <= 450
    assert sum(lengths.values()) / len(lengths) <= 150


def test_a_model_enters_the_rooms_in_the_order_of_the_page() -> None:
    """From ``compile`` to the end of the first ``train_step``."""
    entered: dict[str, None] = {}
    homes = {str(path): room_of(module_of(path)) for path in sources()}

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            room = homes.get(frame.f_code.co_filename)
            if room is not None:
                entered.setdefault(room)

    batch = mlp_batch()
    planner.compile(seeded(Mlp), "cpu-local:1", loss_fn=squared_error, example_inputs=batch)  # imports are done
    main = threading.get_ident()
    entered.clear()
    sys.setprofile(lambda *event: note(*event) if threading.get_ident() == main else None)
    try:
        planner.compile(seeded(Mlp), "cpu-local:1", loss_fn=squared_error, example_inputs=batch).train_step(*batch)
    finally:
        sys.setprofile(None)
    way = re.search(r"## The way of a model\n(.*?)\n## ", PAGE.read_text(), flags=re.S)
    assert way is not None
    assert list(entered) == re.findall(r"^\d+\. `([\w.]+)`", way[1], flags=re.M)


def test_the_glossary_has_each_word_once() -> None:
    words = re.findall(r"^\* \*\*([^*]+)\*\*", Path(ROOT / "docs" / "glossary.md").read_text(), flags=re.M)
    assert len(words) == len(set(words)) > 30
