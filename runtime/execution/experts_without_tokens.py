"""Experts of a loop that no token of a step chose: on one device their parameters have no gradient."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from passes.pipeline_cut import StageGraph
from passes.pipeline_cut.expert_calls import expert_calls
from passes.pipeline_cut.looped_experts import looped_experts
from passes.rules.expert_rules import EXPERT_LINEAR, stacked_by_loop
from runtime.agreement.ranks_together import Ranks
from runtime.execution.expert_load import ChunkListener, following_chunks
from runtime.kernels.routing_listeners import listening, listening_to_layers
from runtime.torch_compat.autograd_engine import FollowedPass, when_done

#: For each expert, the paths of its parameters.
_Experts = tuple[frozenset[str], ...]


class LoopedExpertParameters:
    """Takes back the zeros that stacking gives as gradients to parameters of experts without tokens.

    A parameter that had no gradient before a backward pass has none after it if none of its experts had any token, on
    any rank, in any micro-batch. It costs a gather of these experts' paths in each step.

    Args:
        stages: this rank's chunks.
        ranks: of all the step, all of which must make this and use it.
        compiled: whether blocks are compiled, and do not tell where tokens go.
        find: gives the parameter that this rank has under a path, None if it has none.
    """

    def __init__(
        self,
        stages: Sequence[StageGraph],
        ranks: Ranks,
        *,
        compiled: bool,
        find: Callable[[str], nn.Parameter | None],
    ) -> None:
        self._ranks, self._find = ranks, find
        loops = [looped_experts(stage.sharded.graph) for stage in stages]
        here: set[str] = set().union(*(loop.unknown for loop in loops))
        experts = {path for loop in loops for each in loop.parameters.values() for own in each for path in own}
        self._parameters = () if compiled else tuple(sorted(experts))
        self._calls = {id(stage): _calls_of(stage, loop.parameters) for stage, loop in zip(stages, loops)}
        #: Whether the model has such experts, on whatever rank: all ranks gather then.
        self.any = not compiled and any(stacked_by_loop(node) for stage in stages for node in stage.sharded.graph.nodes)
        self._of_backward: list[frozenset[str]] = []
        self._pass: FollowedPass | None = None
        if unfollowed := sorted(here | experts if compiled else here):
            warnings.warn(
                f"experts without tokens: {unfollowed[0]!r} and other parameters of a loop over experts "
                f"({len(unfollowed)} in all) get a gradient of zeros in a step in which no token chooses their expert, "
                "where one device leaves None: weight decay and momentum then move them. "
                + ("Plan without compiled=True" if compiled else "Give an expert's layers one dim of experts, stacked"),
                stacklevel=2,
            )

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run forward and backward passes of a step, all of them inside."""
        if not self.any:
            yield
            return
        fresh = self._without_gradient()
        with self._recording() as reached:
            yield
        self._drop(fresh, self._without_tokens(reached))

    def forward(self, run: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The outputs of a forward pass; the backward pass that comes to them is followed."""
        if not self.any or not torch.is_grad_enabled():
            return run()
        with self._recording() as reached:
            outputs = run()
        idle = self._without_tokens(reached)
        for tensor in outputs.values():
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._backward_comes(idle))
        return outputs

    def _backward_comes(self, idle: frozenset[str]) -> None:
        """Note a forward pass whose outputs' gradient arrives; several may be differentiated together."""
        if self._pass is None or not self._pass.is_running:  # one that raised has left its entries
            self._pass, self._of_backward = FollowedPass(), []
            fresh = self._without_gradient()

            def end() -> None:
                passes, self._of_backward, self._pass = self._of_backward, [], None
                when_done(lambda: self._drop(fresh, frozenset.intersection(*passes)))  # behind ZeRO's own end

            when_done(end)
        self._of_backward.append(idle)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[_ReachedExperts]:
        reached = _ReachedExperts(self._calls)
        with following_chunks(reached), listening(reached.note), listening_to_layers(reached.note_layer):
            yield reached

    def _without_tokens(self, reached: _ReachedExperts) -> frozenset[str]:
        of_ranks = self._ranks.gathered(sorted(reached.parameters()))
        return frozenset(self._parameters).difference(*of_ranks)

    def _without_gradient(self) -> dict[str, nn.Parameter]:
        owners = {path: self._find(path) for path in self._parameters}
        return {path: owner for path, owner in owners.items() if owner is not None and owner.grad is None}

    def _drop(self, fresh: Mapping[str, nn.Parameter], idle: frozenset[str]) -> None:
        for path in idle & fresh.keys():
            fresh[path].grad = None


def _calls_of(stage: StageGraph, parameters: Mapping[str, _Experts]) -> tuple[list[_Experts], list[_Experts]]:
    """Whose ids the operators of a chunk are given, in the order in which they run: whole mixtures, and layers."""
    keys = ([call.key for call in expert_calls(stage)], [call.key for call in expert_calls(stage, EXPERT_LINEAR)])
    of_mixtures, of_layers = ([parameters.get(key, ()) for key in each] for each in keys)
    return of_mixtures, of_layers


class _ReachedExperts(ChunkListener):
    """Which experts got tokens on this rank."""

    def __init__(self, calls: Mapping[int, tuple[list[_Experts], list[_Experts]]]) -> None:
        self._calls = calls
        self._flags: dict[_Experts, torch.Tensor] = {}
        self._mixtures: Iterator[_Experts] = iter(())
        self._layers: Iterator[_Experts] = iter(())

    def begin(self, graph: StageGraph) -> None:
        mixtures, layers = self._calls.get(id(graph), ((), ()))
        self._mixtures, self._layers = iter(mixtures), iter(layers)

    def note(self, expert_ids: torch.Tensor, num_experts: int) -> None:
        """Take up where the tokens of the next mixture go."""
        self._take(next(self._mixtures), expert_ids, num_experts)

    def note_layer(self, expert_ids: torch.Tensor, num_experts: int) -> None:
        """Take up where the rows of the next linear layer go."""
        self._take(next(self._layers), expert_ids, num_experts)

    def _take(self, experts: _Experts, expert_ids: torch.Tensor, num_experts: int) -> None:
        if not experts:
            return
        from runtime.torch_compat.local_tensors import maybe_disable_local_tensor_mode, parts_of_ranks

        for part in parts_of_ranks(expert_ids.detach(), ranks=(0,)).values():
            with maybe_disable_local_tensor_mode():
                flags = torch.zeros(num_experts + 1, dtype=torch.bool, device=part.device)
                ids = part.flatten()
                flags[torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)] = True
                self._flags[experts] = flags if experts not in self._flags else self._flags[experts] | flags

    def parameters(self) -> set[str]:
        """Paths of the parameters of experts that got tokens; waits for the device."""
        return {
            path
            for experts, flags in self._flags.items()
            for own, is_reached in zip(experts, flags.tolist())
            if is_reached
            for path in own
        }
