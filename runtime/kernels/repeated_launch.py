"""Kernels whose further launches with like arguments go straight to their machine code.

Triton looks at every argument, option and setting of every launch, which takes the host 10 to 25 µs; small models wait
for that. What a launch compiles to depends on little of it: the device, the grid, dtypes, which pointers are multiples
of 16 bytes, and the values of all that is no tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.compiler import CompiledKernel

from runtime.kernels.spill_free import SpillFreeKernel
from runtime.torch_compat.triton_launches import machine_launch

#: Triton compiles other code for pointers that are a multiple of this.
_ALIGNMENT = 16
_GRID_DIMS = 3
#: Launches that one kernel keeps: of so many lengths, say.
_MOST_LAUNCHES = 1024


class RepeatedKernel(SpillFreeKernel):
    """A kernel that keeps what its launches have compiled to, by the arguments that this depends on.

    The first argument is a tensor on the device that is current. A parameter that is no tensor always has one type.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        #: By kind of launch: the launch of its machine code, and the values behind the arguments.
        self._launches: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if callable(grid) or self.pre_run_hooks:
            return super().__getitem__(grid)  # type: ignore[no-any-return]
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        key = [grid, arguments[0].device, *options.values()]
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                key.append(argument.dtype)
                key.append(argument.data_ptr() % _ALIGNMENT == 0)
            else:
                key.append(argument)
        kind = tuple(key)
        if kind in self._launches:
            launch, constants = self._launches[kind]
            launch(*arguments, *constants)
            return
        before = self.remedy_of(arguments, options)
        compiled = self.run(*arguments, grid=grid, warmup=False, **options)
        if isinstance(compiled, CompiledKernel) and self.remedy_of(arguments, options) is before and _is_tried(before):
            if len(self._launches) >= _MOST_LAUNCHES:
                self._launches.clear()
            whole_grid = (*grid, *[1] * (_GRID_DIMS - len(grid)))
            launch = machine_launch(compiled, whole_grid, arguments[0].device)
            self._launches[kind] = launch, self._constants_behind(arguments, options)

    def _constants_behind(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """The values of the parameters behind ``arguments``, which machine code is given by position."""
        named = {name: value for name, value in options.items() if name in self.signature.parameters}
        bound = self.signature.bind(*arguments, **named)
        bound.apply_defaults()
        return bound.args[len(arguments) :]

    def forget(self) -> None:
        super().forget()
        self._launches.clear()


def _is_tried(remedy: Any) -> bool:
    """Whether code that spilled has been compiled with more room, and the better of the two chosen."""
    return remedy is None or remedy.has_run
