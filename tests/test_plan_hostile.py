"""A plan file of a stranger: whatever stands in it, it is refused or gives a program that the model could have had."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from passes.emit import emit
from passes.emit.quoting import comment, docstring, literal
from passes.ir.types import MeshShape
from passes.pipeline_cut import step_programs
from passes.plan import Plan
from passes.plan.plan_grammar import GRAMMARS
from passes.plan.serving import ServingPlan
from passes.shard import shard
from tests.emit_cases import between_copies_plan, step_plan
from tests.hand_plan import mlp_graph

SENTINEL = "intruder"
#: The attack that was seen, and others at each place where a name of a plan stands in source.
ATTACKS = (
    f'dp"""\nimport os; {SENTINEL}()\n"""',
    f'tp", src=R, dst=R); {SENTINEL}(); spmd.convert(x, "tp',
    f"tp', {SENTINEL}(), '",
    f"\n{SENTINEL}()\n",
    f"dp\r{SENTINEL}()",
    f"dp\u2028{SENTINEL}()",
    f"dp\x0c{SENTINEL}()\x0b",
    f"{{0.__class__.{SENTINEL}}}",
    f"S(0)\n{SENTINEL}()",
    f"S({SENTINEL}())",
    f"cut {SENTINEL}()",
    f"\\\n{SENTINEL}()",
    f'\\"""\n{SENTINEL}()',
    "dtype:" + SENTINEL,
    "\x1b]0;owned\x07",
    "\u202e",
    "",
    "__import__('os')",
    "\ud800",
)
NUMBERS = (-1, 0, 3, 2**31, 2**70, 10**400, 0.5, float("nan"), float("inf"), -float("inf"), 1e308)

GRAPH, MESH_PLAN = between_copies_plan()
STEP_GRAPH = mlp_graph(layers=4, batch=8)
STEP_PLAN = step_plan(STEP_GRAPH)


def sources_of_mesh(plan: Plan) -> list[str]:
    return [emit(shard(GRAPH, plan)).source]


def sources_of_step(plan: Plan) -> list[str]:
    return [emit(stage.sharded).source for stage in step_programs(STEP_GRAPH, plan).stages]


Sources = Callable[[Plan], list[str]]
PLANS: dict[str, tuple[Any, Sources]] = {
    "mesh": (json.loads(MESH_PLAN.to_json()), sources_of_mesh),
    "step": (json.loads(STEP_PLAN.to_json()), sources_of_step),
}


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all texts and numbers of JSON, and of the names of its objects (ending in None)."""
    if isinstance(data, dict):
        for key, item in data.items():
            yield (*path, key, None)
            yield from leaves(item, (*path, key))
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from leaves(item, (*path, index))
    else:
        yield path


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of JSON with another value, or another name, at ``path``."""
    changed = copy.deepcopy(data)
    inner = changed
    *way, last = path
    renaming = last is None
    if renaming:
        *way, last = way
    for part in way:
        inner = inner[part]
    if renaming:
        inner[str(value)] = inner.pop(last)
    else:
        inner[last] = value
    return changed


def vocabulary(source: str) -> set[str]:
    """Every identifier of a program, and all that it imports, calls or says as text."""
    field_names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for name in ("id", "attr", "arg", "name", "module"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                field_names.add(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            field_names.update(line.strip() for line in node.value.splitlines())
    return field_names


#: What any plan of a mesh may say beyond what these say.
EVERY_PLAN = {
    "all_gather", "all_reduce", "all_to_all", "reduce_scatter", "convert", "reinterpret", "src", "dst", "expert_mode",
    "S", "R", "I", "P", "V", "unit", "recompute", "none", "selective", "full", "regather", "chunked_loss", "narrow",
    "dp", "tp", "cp", "pp", "ops", "of_microbatch", "of_first_microbatch", "sum", "matmul", "backward_options",
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANS)
def test_no_changed_text_or_number_gives_a_program_that_the_model_could_not_have(kind: str) -> None:
    data, sources = PLANS[kind]
    words = set[str]().union(*map(vocabulary, sources(Plan.from_dict(data)))) | EVERY_PLAN
    places = list(leaves(data))

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(place=st.sampled_from(places), value=st.sampled_from(ATTACKS) | st.sampled_from(NUMBERS) | st.text())
    def refused_or_harmless(place: tuple[Any, ...], value: Any) -> None:
        try:
            plan = Plan.from_dict(replaced(data, place, value))
            plan.summary(operators=True)
            for source in sources(plan):
                new = {word for word in vocabulary(source) - words if not word.isdigit()}
                # The name of an axis that no tensor is cut over, or of the mesh in the first line, may be another.
                assert all(SENTINEL not in word and "\x1b" not in word for word in new), new
                assert not {word for word in new if "mesh" not in word and word not in plan.mesh.names}, new
        except ValueError:
            pass

    refused_or_harmless()


@pytest.mark.parametrize("attack", ATTACKS[:-4])
@pytest.mark.parametrize("kind", PLANS)
def test_names_of_axes_are_refused_when_a_plan_is_loaded(kind: str, attack: str, tmp_path: Path) -> None:
    """All places that name an axis changed together, as a stranger would."""
    data, _ = PLANS[kind]
    text = json.dumps(data).replace('"dp"', json.dumps(attack))
    file = tmp_path / "plan.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="a mesh axis is named by") as caught:
        Plan.load(file)
    assert str(caught.value).isprintable()


def test_every_grammar_is_of_a_field_of_a_plan() -> None:
    fields: set[str] = set()

    def collect(kind: Any) -> None:
        for inner in typing.get_args(kind):
            collect(inner)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            for name, hint in typing.get_type_hints(kind).items():
                fields.add(f"{kind.__name__}.{name}")
                collect(hint)

    collect(ServingPlan)
    assert {field.removesuffix("{key}") for field in GRAMMARS} <= fields


@pytest.mark.parametrize("text", ATTACKS)
def test_quoted_text_ends_nothing_that_it_stands_in(text: str) -> None:
    assert ast.literal_eval(literal(text)) == text
    assert len(comment(text).splitlines()) <= 1
    (only,) = ast.parse(f'"""{docstring(text)}."""').body
    assert isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant)


def test_names_of_modules_are_quoted_in_comments_and_paths() -> None:
    """A model may call its modules anything (``nn.ModuleDict`` of a config's keys)."""
    graph, plan = between_copies_plan()
    name = f'x"""\n{SENTINEL}()\n#{{0}}'

    def renamed(path: str) -> str:
        return path.replace("layers", name)

    graph = graph.replace(
        nodes=tuple(
            dataclasses.replace(node, module_path=renamed(node.module_path), key=renamed(node.key))
            for node in graph.nodes
        ),
        states=tuple(dataclasses.replace(state, path=renamed(state.path)) for state in graph.states),
    )
    plan = dataclasses.replace(
        plan,
        states={renamed(path): tensor for path, tensor in plan.states.items()},
        nodes={renamed(key): node for key, node in plan.nodes.items()},
        conversions=tuple(dataclasses.replace(step, value=renamed(step.value)) for step in plan.conversions),
        blocks=tuple(
            dataclasses.replace(
                block,
                roots=tuple(tuple(map(renamed, roots)) for roots in block.roots),
                first_node=renamed(block.first_node),
            )
            for block in plan.blocks
        ),
    )
    tree = ast.parse(emit(shard(graph, plan)).source)
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert SENTINEL not in called and len(called) > 3


@pytest.mark.parametrize("names", [("dp", 'a"b'), ("dp", ""), ("dp", "a b"), (1, 2), ("dp", "1a")])
def test_meshes_have_names_that_can_stand_in_source(names: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="a mesh axis is named by"):
        MeshShape(names, (1, 1))


def test_a_model_is_refused_the_plan_of_a_stranger(tmp_path: Path) -> None:
    """Through the public calls: ``compile`` and ``verify`` read the file and run nothing of it."""
    import planner

    marker = tmp_path / "ran"
    model = nn.Sequential(nn.Linear(4, 4))
    text = planner.plan(model, mesh="dp=1", example_inputs=(torch.ones(2, 4),)).to_json()
    file = tmp_path / "plan.json"
    attack = f'dp"""\nopen({str(marker)!r}, "w")\n"""'
    file.write_text(text.replace('"dp"', json.dumps(attack)), encoding="utf-8")
    for call in (planner.compile, planner.verify):
        with pytest.raises(ValueError, match="a mesh axis is named by"):
            call(model, str(file))
    assert not marker.exists()
