"""Which parts of a graph are folded, on graphs written by hand."""

from __future__ import annotations

from passes.ir.graph import Graph, Node, Ref, State, Value, assign_keys
from passes.repeats.repeated_blocks import find_blocks


def chain(layers: list[tuple[str, int]], *, use_of: str | None = None) -> Graph:
    """A chain of linears ``x → linear(x, w)``; each layer is (module path, output size)."""
    x = Value("x", (4, 8), "float32", "input", True)
    states, nodes = [], []
    current = x
    for index, (path, size) in enumerate(layers):
        weight = Value(f"w{index}", (size, current.shape[1]), "float32", "parameter", True)
        states.append(State(weight, f"{path}.weight"))
        out = Value(f"h{index}", (4, size), "float32", "node", True)
        nodes.append(Node(out.name, "aten.linear.default", (Ref(current.name), Ref(weight.name)), {}, (out,), path))
        relu = Value(f"r{index}", (4, size), "float32", "node", True)
        nodes.append(Node(relu.name, "aten.relu.default", (Ref(out.name),), {}, (relu,), path))
        current = relu
    outputs = {"0": current.name} | ({"1": use_of} if use_of else {})
    return Graph("Chain", (x,), (("x",),), tuple(states), assign_keys(tuple(nodes)), outputs)


def test_equal_layers_fold_into_one_run() -> None:
    graph = chain([("head", 8), ("layers.0", 8), ("layers.1", 8), ("layers.2", 8), ("tail", 3)])
    (run,) = find_blocks(graph)
    assert run.copies == (("h1", "r1"), ("h2", "r2"), ("h3", "r3"))
    assert run.roots == (("layers.0",), ("layers.1",), ("layers.2",))
    assert run.carried == (("r0", "r1", "r2"),)
    assert run.carried_output == ("r1",)
    assert run.states == (("w1", "w2", "w3"),)
    assert run.shared == ()


def test_layers_of_other_shapes_do_not_fold() -> None:
    assert find_blocks(chain([("layers.0", 16), ("layers.1", 24), ("layers.2", 8)])) == ()


def test_a_period_of_two_entries_folds() -> None:
    (run,) = find_blocks(chain([(f"net.{i}", 16 if i % 2 == 0 else 8) for i in range(6)]))
    assert run.num_copies == 3
    assert run.roots[1] == ("net.2", "net.3")


def test_a_run_ends_where_a_middle_value_is_used_outside() -> None:
    graph = chain([(f"layers.{i}", 8) for i in range(6)], use_of="h2")
    sizes = [[copy[0] for copy in run.copies] for run in find_blocks(graph)]
    assert sizes == [["h0", "h1", "h2"], ["h3", "h4", "h5"]]


def test_inner_lists_fold_when_outer_ones_differ() -> None:
    layers = [(f"stages.0.{i}", 8) for i in range(3)] + [(f"stages.1.{i}", 16) for i in range(1)]
    layers += [(f"stages.1.{i}", 16) for i in range(1, 4)]
    runs = find_blocks(chain(layers))
    assert [run.roots[0] for run in runs] == [("stages.0.0",), ("stages.1.1",)]
    assert [run.num_copies for run in runs] == [3, 3]


def test_shared_weights_do_not_count_as_own_states() -> None:
    graph = chain([("layers.0", 8), ("layers.1", 8), ("layers.2", 8)])
    tied = {"w1": "w0", "w2": "w0"}
    nodes = tuple(
        Node(
            node.name, node.op,
            tuple(Ref(tied.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg for arg in node.args),
            node.kwargs, node.outputs, node.module_path,
        )
        for node in graph.nodes
    )  # fmt: skip
    (run,) = find_blocks(graph.replace(nodes=nodes, states=graph.states[:1]))
    assert run.states == () and run.shared == ("w0",)
