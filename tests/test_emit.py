"""The emitted source, whole, against golden files; and what the emitter's parts do.

After a wanted change: ``MESHWRIGHT_REGENERATE=1 pytest tests/test_emit.py`` rewrites the golden files.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from passes.emit import Program
from passes.emit.paths import arithmetic, attribute, list_slice, roots_title
from passes.emit.role_tables import PARTS, VIEWS
from passes.emit.source_layout import fitted
from passes.emit.statements import METHODS
from passes.emit.variable_names import Names, class_name, identifier
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from passes.shard import PlanMismatch, shard
from runtime.program_tools.typecheck import ProgramTypeError, typecheck
from tests.emit_cases import CASES as HAND_WRITTEN
from tests.emit_models import CASES as PLANNED
from tests.emit_models import programs
from tests.hand_plan import hand_plan, mlp_graph
from tests.versions import transformers_version

pytestmark = pytest.mark.usefixtures("models_traced_once")

GOLDEN = Path(__file__).parent / "golden"
CASES = {**HAND_WRITTEN, **PLANNED}


@functools.cache
def program_of(case: str) -> Program:
    return CASES[case]()


@pytest.mark.parametrize("case", CASES)
def test_source_is_golden(case: str) -> None:
    if case.startswith("llama") and transformers_version() < (5, 20):
        pytest.skip("before 5.20 transformers' Llama computes its angles by a matrix product")
    source = program_of(case).source
    golden = GOLDEN / f"{case}.py"
    if os.environ.get("MESHWRIGHT_REGENERATE"):
        golden.write_text(source, encoding="utf-8")
    assert source == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_golden_programs_are_well_typed(case: str) -> None:
    typecheck(program_of(case))


def test_every_golden_program_is_one_of_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(CASES) and len(CASES) >= 30


def test_golden_programs_fit_in_120_columns_and_use_what_they_import() -> None:
    """By ruff as it is, without this project's settings."""
    pytest.importorskip("ruff")
    rules = ["--isolated", "--line-length=120", "--select=E,F,W,I", "--config=src = ['.']"]
    command = [sys.executable, "-m", "ruff", "check", *rules, str(GOLDEN)]
    lint = subprocess.run(command, capture_output=True, text=True, cwd=GOLDEN.parents[1])
    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize("case", CASES)
def test_values_with_a_role_are_not_called_like_an_operator_with_a_number(case: str) -> None:
    names = {node.id for node in ast.walk(ast.parse(program_of(case).source)) if isinstance(node, ast.Name)}
    views = "|".join((VIEWS | PARTS | METHODS) - {"t"})
    assert not [name for name in names if re.fullmatch(rf"({views})(_\d+)?|(linear|matmul|add|mul|cat)_\d+", name)]


def test_a_block_has_the_name_of_its_own_class_where_only_its_children_compute() -> None:
    (program,) = programs("stacked", "dp=1")
    assert "class Wrapped(Block):  # layers.{1..2}" in program.source


def test_long_lines_are_broken_inside_brackets_and_mean_the_same() -> None:
    names = ", ".join(f"argument_number_{index}" for index in range(12))
    source = f'first, second = function("a, (b", [{names}], of=({names})) + other({names})\nx = {{"1, 2": 1}}\n'
    broken = fitted(source)
    assert max(map(len, broken.splitlines())) <= 120 < max(map(len, source.splitlines()))
    assert ast.dump(ast.parse(broken)) == ast.dump(ast.parse(source))


def test_what_follows_a_closed_bracket_is_broken_too() -> None:
    names = ", ".join(f"argument_number_{index}" for index in range(12))
    source = f"if x:\n    y = function({names})" + " + gradient_of_activation * slope(te)" * 4 + "\n"
    assert ast.dump(ast.parse(fitted(source))) == ast.dump(ast.parse(source))


def test_a_missing_reduction_is_refused_and_the_line_named() -> None:
    import dataclasses

    program = program_of("tensor_parallel")
    broken = re.sub(r"spmd\.all_reduce\((\w+), [^\n#]*\)", r"\1", program.source)
    assert broken != program.source
    with pytest.raises(ProgramTypeError, match=r"emitted program: .*"):
        typecheck(dataclasses.replace(program, source=broken))


def test_a_gradient_left_partial_is_refused() -> None:
    import dataclasses

    program = program_of("tensor_parallel")
    broken = program.source.replace('x = spmd.convert(x, "tp", src=I, dst=R)', "pass")
    assert broken != program.source
    with pytest.raises(ProgramTypeError):
        typecheck(dataclasses.replace(program, source=broken))


def test_tracebacks_show_the_emitted_line() -> None:
    program = program_of("tensor_parallel")
    entry = program.load()["Program"]
    try:
        entry(None)(None)
    except AttributeError:
        text = traceback.format_exc()
    assert program.filename in text
    assert "F.linear(x, w.layers[0].up.weight" in text


def test_saved_source_can_be_imported(tmp_path: Path) -> None:
    path = tmp_path / "plan_program.py"
    program_of("fully_sharded").save(path)
    spec = importlib.util.spec_from_file_location("plan_program", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert hasattr(module, "Program")


def whole_plan(graph: Graph, *, x: str = "R") -> Plan:
    """Everything whole on both of two ranks."""
    strategies = {node.name: ("invariant",) for node in graph.nodes}
    states = {state.path: ("I",) for state in graph.states}
    outputs = {"loss": ("I",), "out": ("I",)}
    mesh = MeshShape(("dp",), (2,))
    return hand_plan(graph, mesh, strategies=strategies, states=states, inputs={"x": (x,)}, outputs=outputs)


def test_a_plan_for_another_model_is_refused() -> None:
    plan = whole_plan(mlp_graph(layers=1))
    with pytest.raises(ValueError, match=r"another model.*layers.1.up.weight"):
        shard(mlp_graph(layers=2), plan)
    with pytest.raises(ValueError, match=r"another model.*shape \[32, 8\]"):
        shard(mlp_graph(layers=1, hidden=16), plan)


def test_an_input_that_cannot_be_divided_is_named() -> None:
    plan = whole_plan(mlp_graph(layers=1), x="S(0)")
    with pytest.raises(ValueError, match=r"input 'x' has size 3 in dim 0.*mesh axis dp=2"):
        shard(mlp_graph(layers=1, batch=3), plan)


def test_an_unknown_node_is_a_mismatch() -> None:
    graph = mlp_graph(layers=1)
    plan = whole_plan(graph)
    del plan.nodes[graph.nodes[-1].key]
    with pytest.raises(PlanMismatch, match="mean"):
        shard(graph, plan)


def test_names_are_unique_and_hide_nothing() -> None:
    names = Names()
    assert [names.new("view"), names.new("view"), names.new("torch")] == ["view", "view_1", "torch_1"]
    assert identifier("sum") == "total"
    assert identifier("class") == "class_"
    assert identifier("0.weight") == "value_0_weight"
    assert class_name("Foo[int]") == "Fooint"


def test_paths_as_source() -> None:
    assert attribute("w", "model.layers.0.proj") == "w.model.layers[0].proj"
    assert attribute("w", "heads.foo-bar.class") == 'w.heads["foo-bar"]["class"]'
    assert list_slice(["a.0", "a.1", "a.2"]) == "w.a[:3]"
    assert list_slice(["a.1", "a.3"]) == "w.a[1:4:2]"
    assert list_slice(["0", "1"]) == "w[:2]"
    assert list_slice(["a.1", "b.2"]) == "[w.a[1], w.b[2]]"
    assert roots_title((("h.0",), ("h.1",))) == "h.{0..1}"


@pytest.mark.parametrize("numbers", [(1, 4, 7), (0,), (1, 2, 5), (5, 3, 1), (3, 3)])
def test_numbers_of_draws_need_not_be_equally_spaced(numbers: tuple[int, ...]) -> None:
    assert tuple(eval(arithmetic(numbers))) == numbers
