"""A parallel module keeps the modules and tensors that it was planned with: none is added, replaced or removed.

Programs call no modules, so nobody would run one that is added; and its values would be this rank's alone: no plan
keeps them alike on all ranks, trains them together, or saves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes.torch_compat.module_tables import buffers_of, children_of, parameters_of, tensors_of

#: Methods of torch's containers that change their tables without asking the module.
CONTAINER_CHANGES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.ModuleList: ("insert",),
    nn.Sequential: ("insert",),
    nn.ModuleDict: ("__delitem__", "clear"),
}
_INSTEAD = "change the model before planner.compile"


class FixedStructure(nn.Module):
    """A base of the parallel module and of the modules in it, whose changes of structure it refuses."""

    def _fixed_path(self) -> str | None:
        """The module's path in the model ("" for the model); None while anything may still be put in."""
        raise NotImplementedError

    def _elsewhere(self, name: str) -> torch.Tensor | None:
        """A buffer of this module that another pipeline stage has, without data."""
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        path = self._fixed_path()
        if path is not None and name != "training":
            _check_assignment(self, path, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        path = self._fixed_path()
        if path is not None and (name in children_of(self) or name in tensors_of(self)):
            raise ValueError(f"{_joined(path, name)!r} of this parallel module cannot be removed: {_INSTEAD}")
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        path = self._fixed_path()
        if path is not None:
            _check_module(self, path, name, module)
        super().add_module(name, module)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        self.add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        path = self._fixed_path()
        if path is not None:
            _check_parameter(self, path, name, param)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        path = self._fixed_path()
        if path is not None and (name in buffers_of(self) or self._elsewhere(name) is not None):
            write_buffer(self, path, name, tensor)
            return
        if path is not None and persistent and tensor is not None:
            raise _added(path, name)
        super().register_buffer(name, tensor, persistent)


def write_buffer(module: FixedStructure, path: str, name: str, value: Any) -> None:
    """Write what is set in the place of a buffer into it; into another stage's, its own ranks write.

    Raises:
        ValueError: for another shape, as programs were made for what was there.
    """
    own = buffers_of(module).get(name)
    buffer = module._elsewhere(name) if own is None else own
    if buffer is None:
        return
    if not isinstance(value, torch.Tensor) or value.shape != buffer.shape:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        raise ValueError(
            f"buffer {_joined(path, name)!r} of this parallel module has shape {tuple(buffer.shape)} and cannot become "
            f"{shape}: programs were made for it; {_INSTEAD}"
        )
    if own is not None:
        with torch.no_grad():
            own.copy_(value)


def refused_changes(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """What a container of class ``kind`` does instead of changing its tables, by method."""
    names = (name for container, names in CONTAINER_CHANGES.items() if issubclass(kind, container) for name in names)
    return dict.fromkeys(names, _refuse_change)


def _refuse_change(self: FixedStructure, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(f"the modules of {self._fixed_path()!r} of this parallel module stay as planned: {_INSTEAD}")


def _check_assignment(module: nn.Module, path: str, name: str, value: Any) -> None:
    if isinstance(value, nn.Parameter) or name in parameters_of(module):
        _check_parameter(module, path, name, value)
    elif isinstance(value, nn.Module) or children_of(module).get(name) is not None:
        _check_module(module, path, name, value)


def _check_module(module: nn.Module, path: str, name: str, value: Any) -> None:
    present = children_of(module).get(name)
    if present is not None and present is not value:
        raise ValueError(
            f"{_joined(path, name)!r} of this parallel module cannot be replaced, as its programs call no modules: "
            f"{_INSTEAD}"
        )
    if present is None and value is not None and (path or value.state_dict()):
        raise _added(path, name)


def _check_parameter(module: nn.Module, path: str, name: str, value: Any) -> None:
    present = parameters_of(module).get(name)
    if present is None and value is not None:
        raise _added(path, name)
    if present is not value:
        raise ValueError(
            f"{_joined(path, name)!r} of this parallel module cannot become another tensor, which it would not train: "
            "write values into the parameter (load_full_state_dict, copy_; load_state_dict without assign=True), and "
            "wrap the module in no other parallelism (DDP, FSDP, parallelize_module)"
        )


def _added(path: str, name: str) -> ValueError:
    return ValueError(
        f"{_joined(path, name)!r} cannot be added to this parallel module: its programs would not run it, and its "
        f"values would be this rank's alone, neither trained together nor saved; {_INSTEAD}, or keep it outside"
    )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
