"""Random numbers drawn on parameters of a parallel module: those of the mesh's first rank, drawn for the whole tensor.

DTensor on a processor lets every rank draw for its own part. Parts that are cut would then repeat each other's numbers
where ranks have one seed, and whole tensors would differ between ranks where each has its own. So every rank draws the
whole tensor from the state of the first rank's generator, which is what one device does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from runtime.mesh.first_rank import from_first_rank
from runtime.parameters.whole_tensors import run_whole

if TYPE_CHECKING:
    from runtime.parameters.tensors import ParameterTensor


def draws(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def run_drawn(operator: Any, args: Any, kwargs: Any, beside: ParameterTensor) -> Any:
    """``run_whole`` of an operator that draws; every rank of the mesh of ``beside`` must call it.

    Raises:
        ValueError: with a pipeline: stages that draw from one state would draw the same for different parameters.
    """
    if beside.of_stage:
        raise ValueError(
            f"{operator.name().removeprefix('aten::')} draws random numbers for {beside.path!r}, but with a pipeline a "
            "rank has the parameters of its own stage alone and would draw other numbers than one device: draw before "
            "planner.compile, or draw plain tensors for all parameters of the model from one seed, and copy_ those "
            "that this rank has"
        )
    generator = kwargs.get("generator") or _default_generator(beside.device)
    with _as_on_first_rank(generator, beside):
        return run_whole(operator, args, kwargs, beside)


@contextmanager
def _as_on_first_rank(generator: torch.Generator, beside: DTensor) -> Iterator[None]:
    """Inside, ``generator`` goes on where the first rank's is; one that was elsewhere goes back there."""
    own = generator.get_state()
    (first,) = from_first_rank([own], beside.device_mesh, beside.device)
    first = first.to(own.device)
    generator.set_state(first)
    try:
        yield
    finally:
        if not torch.equal(own, first):
            generator.set_state(own)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: tuple[torch.Generator, ...] = torch.get_device_module(device).default_generators
    return generators[device.index or 0]
