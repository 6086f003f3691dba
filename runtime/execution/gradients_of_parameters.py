"""Gradients of parameters that a script asks autograd for by name: ``torch.autograd.grad``, ``backward(inputs=…)``.

What users see of a parameter (a DTensor) is no leaf of the programs' autograd graph, so autograd would find no way from
an output to it: ``grad`` would refuse, ``backward(inputs=…)`` would leave no gradient and not say so. Each output
therefore has a second way back, over one node for all parameters (the *hub*), that usual backward passes leave alone::

    output ── Shown ──┬── the programs' graph ── tokens and owners
                      └── Hub ── the parameters that users see

A pass that is asked for some of the parameters reaches the hub, which runs a pass of its own through the programs'
graph and hands on the gradients that are then the owners'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from runtime.kernels.direct import apply_of
from runtime.parameters.sharded import as_seen, local_of
from runtime.torch_compat.autograd_engine import gradient_node, keeps_graph, will_run


class GradientsOfParameters:
    """The way back from the outputs of one call to the parameters that users see.

    Args:
        parameters: those that are trained, as users see them.
        leaves: of the programs' graph; autograd finds a parameter among them by itself.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], leaves: Sequence[nn.Parameter]) -> None:
        own = {id(leaf) for leaf in leaves}
        self._request = _Request([one for one in parameters if id(one) not in own], leaves)
        self._hub: torch.Tensor | None = None

    def shown(self, output: torch.Tensor) -> torch.Tensor:
        """``output`` with a way back to the parameters."""
        with torch.enable_grad():
            if self._hub is None:  # made after the programs' graph: autograd runs first what was made last
                every = torch.zeros((), device=output.device, requires_grad=True)
                self._hub = _hub(self._request, every, *self._request.parameters)
                self._node_of_every_pass = gradient_node(every)
            shown: torch.Tensor = _shown(output, self._hub, self._request, self._node_of_every_pass)
        return shown


class _Request:
    """What one backward pass asks for; a part of the autograd graph, so it must not refer to the graph's nodes."""

    def __init__(self, parameters: Sequence[torch.Tensor], leaves: Sequence[nn.Parameter]) -> None:
        self.parameters, self._leaves = parameters, list(leaves)
        self._asked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._runs_after_this = False

    def ask(self, output: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note the gradient of an output of the programs."""
        self._asked.append((output, gradient))
        assert output.grad_fn is not None
        self._runs_after_this |= will_run(output.grad_fn)

    def gradients(self) -> list[torch.Tensor | None]:
        """What was asked for: of every parameter its gradient, None if it has none."""
        asked, self._asked = self._asked, []
        retain, self._runs_after_this = self._runs_after_this or keeps_graph(), False
        if not asked or not self._leaves:
            return [None] * len(self.parameters)
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True: gradients of a parallel module's parameters cannot be differentiated again; "
                "ask for them without create_graph, or differentiate inside of the model's forward"
            )
        owners = [local_of(one) for one in self.parameters]
        before = [owner.grad for owner in owners]
        for owner in owners:
            owner.grad = None
        try:
            outputs, gradients = zip(*asked)
            torch.autograd.backward(outputs, gradients, retain_graph=retain, inputs=self._leaves)
            return [as_seen(one, owner.grad) for one, owner in zip(self.parameters, owners)]
        finally:
            for owner, gradient in zip(owners, before):
                owner.grad = gradient


class _Hub(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: _Request, every: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.request = request
        ctx.set_materialize_grads(False)
        return every.detach()

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, *ctx.request.gradients()


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, hub: torch.Tensor, request: _Request, node_of_every_pass: Node
    ) -> torch.Tensor:
        ctx.output, ctx.hub, ctx.request, ctx.node_of_every_pass = output, hub.grad_fn, request, node_of_every_pass
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if gradient is None:
            return None, None, None, None
        if isinstance(gradient, DTensor):  # of a sum with what a script computes from parameters (an L2 penalty)
            gradient = gradient.full_tensor()
        if not will_run(ctx.node_of_every_pass) and will_run(ctx.hub):
            ctx.request.ask(ctx.output, gradient)
        return gradient, None, None, None


_hub, _shown = apply_of(_Hub), apply_of(_Shown)
