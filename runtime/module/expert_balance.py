"""Balancing experts by a bias of their scores alone, without a loss (DeepSeek-V3)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from runtime.execution.expert_load import ExpertLoad
from runtime.module.parallel_module import ParallelModule

#: What models of transformers call the bias that only the choice of experts sees.
CORRECTION_BIAS = "e_score_correction_bias"


def balance_experts(
    parallel: ParallelModule, load: ExpertLoad, *, rate: float = 1e-3, buffer: str = CORRECTION_BIAS
) -> None:
    """``bias += rate * sign(mean load - load)`` in every layer: experts with few tokens are chosen more often.

    To be called by all ranks after the optimizer's step, with the load of that step:

        with parallel.expert_load() as load:
            parallel.train_step(**batch)
        optimizer.step()
        planner.balance_experts(parallel, load)

    Args:
        rate: how far each bias moves.
        buffer: name of the bias [experts], a buffer beside the experts or in a module beside them.

    Raises:
        ValueError: for a layer that has no such buffer of one entry for each expert.
    """
    state = parallel._state
    for path, tokens in load.tokens.items():
        name = _nearest(path, buffer, state.infos)
        bias = None if name is None else state.whole(name)
        if name is None or bias is None or bias.shape != tokens.shape:
            what = "has none" if bias is None else f"{name!r} is {list(bias.shape)}"
            raise ValueError(
                f"the experts {path!r} need a buffer {buffer!r} of {len(tokens)} entries, their module {what}: pass "
                "the name of the bias that their router adds before it chooses"
            )
        direction = torch.sign(tokens.double().mean() - tokens.double())
        state.load(name, bias + (rate * direction).to(bias.dtype))
    parallel.weights_changed()


def _nearest(path: str, buffer: str, names: Iterable[str]) -> str | None:
    """The buffer's full name in the innermost module around ``path`` that has just one."""
    candidates = [name for name in names if name == buffer or name.endswith(f".{buffer}")]
    while True:
        inside = [name for name in candidates if not path or name.startswith(f"{path}.")]
        if inside or not path:
            return inside[0] if len(inside) == 1 else None
        path = path.rpartition(".")[0]
