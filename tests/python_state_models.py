"""Models that hold something in Python between their calls: what the next call reads, and what nothing reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

CALLS = 0


class Holding(nn.Module):
    """A linear and a place for whatever a model keeps; ``compute(self, x)`` is its forward without the loss."""

    calls_of_class = 0

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor], **held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.compute = compute
        for name, value in held.items():
            if name.startswith("buffer"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x).square().sum()


def list_length(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.held.append(1)
    return model.linear(x) * len(model.held)


def number_in_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.held[0] += 1
    return model.linear(x) * model.held[0]


def number_in_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.held["calls"] = model.held.get("calls", 0) + 1
    return model.linear(x) * model.held["calls"]


def number_in_object(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.held.calls += 1
    return model.linear(x) * model.held.calls


def number_of_class(model: Any, x: torch.Tensor) -> torch.Tensor:
    Holding.calls_of_class += 1
    return model.linear(x) * Holding.calls_of_class


def global_number(model: Any, x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return model.linear(x) * CALLS


def new_attribute(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return model.linear(x) * model.calls


def tensor_attribute(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = model.linear(x) if model.held is None else model.linear(x) + model.held
    model.held = out.detach()
    return out


def tensor_in_new_tuple(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = model.linear(x) + (model.held[0] if model.held else 0)
    model.held = (out.detach(),)
    return out


def tensors_in_queue(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = sum(model.held, model.linear(x))
    model.held.append(out.detach())
    return out


def tensors_in_nested_list(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = sum(model.held.setdefault("memory", []), model.linear(x))
    model.held["memory"].append(out.detach())
    return out


def swapped(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.held.reverse()
    return model.linear(x) * model.held[0]


def cached_from_weight(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.held is None:
        model.held = model.linear.weight.detach().sum(0)
    return model.linear(x) * model.held


def cached_random(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.held is None:
        model.held = torch.rand(4)
    return model.linear(x) * model.held


def growing_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = model.linear(x) * (1 + model.buffer.sum())
    model.buffer = torch.cat([model.buffer, x[:, 0]])
    return out


def buffer_with_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = model.linear(x) + model.buffer
    model.buffer = out * 0.5
    return out


#: What the next call reads: the forward, and what the model holds at first.
READ_BY_THE_NEXT_CALL: dict[Callable[..., torch.Tensor], Callable[[], dict[str, Any]]] = {
    list_length: lambda: {"held": []},
    number_in_list: lambda: {"held": [0]},
    number_in_dict: lambda: {"held": {}},
    number_in_object: lambda: {"held": SimpleNamespace(calls=0)},
    number_of_class: dict,
    global_number: dict,
    new_attribute: dict,
    tensor_attribute: lambda: {"held": None},
    tensor_in_new_tuple: lambda: {"held": ()},
    tensors_in_queue: lambda: {"held": deque(maxlen=2)},
    tensors_in_nested_list: lambda: {"held": {}},
    swapped: lambda: {"held": [torch.ones(4), torch.zeros(4)]},
    cached_from_weight: lambda: {"held": None},
    cached_random: lambda: {"held": None},
    growing_buffer: lambda: {"buffer": torch.zeros(1)},
    buffer_with_gradient: lambda: {"buffer": torch.zeros(2, 4)},
}


def cached_mask(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.held is None:
        model.held = torch.ones(4, 4).triu()
    return model.linear(x) @ model.held


def cached_in_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    if "mask" not in model.held:
        model.held["mask"] = (torch.ones(4, 4).triu(), torch.arange(4.0))
    return model.linear(x) @ model.held["mask"][0] + model.held["mask"][1]


def cached_from_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.held is None:
        model.held = model.buffer.cos()
    return model.linear(x) * model.held


def cached_buffer(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "rows"):
        model.rows = len(x)
        model.register_buffer("cosines", torch.arange(4.0).cos(), persistent=False)
    return model.linear(x) * model.cosines


#: What every call would compute alike: the same as above.
CACHED: dict[Callable[..., torch.Tensor], Callable[[], dict[str, Any]]] = {
    cached_mask: lambda: {"held": None},
    cached_in_dict: lambda: {"held": {}},
    cached_from_buffer: lambda: {"held": None, "buffer": torch.arange(4.0)},
    cached_buffer: dict,
}


def remembers(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.linear(x)
    model.held.append(out)
    return out


def running_mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model.linear(x) + model.buffer
    model.buffer = 0.9 * model.buffer + 0.1 * out.detach().mean(0)
    return out
