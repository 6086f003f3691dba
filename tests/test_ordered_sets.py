"""A loop over a set of names is traced in one order, whatever the hashes of the process are."""

from __future__ import annotations

import torch
from torch import nn

from passes.capture import capture
from tests.capture_parity import assert_parity

NAMES = ("sliding", "full", "chunked", "linear", "whole", "local", "dense", "sparse")


class ByName(nn.Module):
    """Goes over its names in the order of a set: made as it was built, and made in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names, self.unique = NAMES, set(NAMES)
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.randn(3, dtype=torch.float64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_name = {name: x * getattr(self, name) for name in set(self.names)}
        frozen = [x + getattr(self, name) for name in frozenset(self.names) if isinstance(self.unique, set)]
        return torch.stack([by_name[name].sin() for name in self.unique] + frozen).sum()


def test_the_names_are_gone_through_in_order() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    graph = capture(ByName(), args=(x,))
    by_kind = {kind: [node for node in graph.nodes if node.op == f"aten.{kind}.Tensor"] for kind in ("mul", "add")}
    for nodes in by_kind.values():
        assert [node.args[1].name for node in nodes] == sorted(NAMES)
    products = [node.outputs[0].name for node in by_kind["mul"]]
    sines = [node for node in graph.nodes if node.op == "aten.sin.default"]
    assert [node.args[0].name for node in sines] == products
    assert_parity(ByName(), args=(x,))
    assert "set" not in globals()
