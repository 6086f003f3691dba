"""What a parallel module answers as the model that it was made from: attributes, methods, dtype, device, generation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from passes.torch_compat.module_tables import tensors_of
from runtime.calls.model_watch import CONTAINERS
from runtime.execution.whole_model import whole_model
from runtime.mesh.first_rank import broadcast_objects, is_first_rank
from runtime.module.extra_state import take_extra_states
from runtime.module.original_methods import method_of_original, property_of_original, shown_for
from runtime.parameters.saved_parts import refuse_parts_of_others
from runtime.parameters.tensors_elsewhere import elsewhere
from runtime.torch_compat.dtensors import are_subclasses_dispatched

if TYPE_CHECKING:
    from runtime.execution.engine import Engine

#: Methods of models that change what was planned, or need values that a rank does not have → what to do instead.
REFUSED_METHODS = {
    **dict.fromkeys(
        (
            *("resize_token_embeddings", "set_input_embeddings", "set_output_embeddings", "tie_weights"),
            *("init_weights", "post_init", "gradient_checkpointing_enable", "gradient_checkpointing_disable"),
            *("activation_checkpointing_enable", "activation_checkpointing_disable"),
            *("enable_input_require_grads", "add_adapter", "load_adapter", "delete_adapter", "set_adapter"),
            *("enable_adapters", "disable_adapters", "merge_and_unload", "merge_adapter", "unmerge_adapter"),
        ),
        "call it on the model before planner.compile",
    ),
    "push_to_hub": "save_pretrained(folder) on all ranks, then upload the folder",
}


class OriginalSurface:
    """Goes before ``nn.Module`` among the bases: what a module lacks itself comes from the original's copy on meta."""

    _engine: Engine
    call_joined: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            engine = self.__dict__.get("_engine")
            if engine is None or name.startswith("__"):
                raise
        if name in REFUSED_METHODS and callable(getattr(engine.model, name, None)):
            return _refuser(name)
        is_computed = isinstance(inspect.getattr_static(type(engine.model), name, None), property)
        try:
            if is_computed:
                engine.watch.look_at_copy()
                return property_of_original(name, engine.model, self)  # type: ignore[arg-type]
            attribute = getattr(engine.model, name)
        except AttributeError:
            kind = type(engine.model).__name__
            raise AttributeError(
                f"neither a parallel module nor the {kind} it runs has an attribute {name!r}"
            ) from None
        if isinstance(attribute, torch.Tensor) and attribute is tensors_of(engine.model).get(name):
            return elsewhere(attribute, name, engine.state.stages_of)
        if inspect.ismethod(attribute) or isinstance(attribute, CONTAINERS):
            engine.watch.look_at_copy()
        if inspect.ismethod(attribute) and attribute.__self__ is engine.model:
            return method_of_original(attribute, engine.model, self)  # type: ignore[arg-type]
        is_shown = isinstance(attribute, (torch.nn.Module, torch.nn.Parameter, torch.optim.Optimizer))
        return shown_for(attribute, engine.model, self) if is_shown else attribute  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of ``nn.Module``; a whole state dict may be given on every rank, whatever stage it has.

        Raises:
            ValueError: for parts of tensors that another rank saved.
            RuntimeError: with ``strict`` for missing and unknown names; on all ranks where a whole state dict is given.
        """
        refuse_parts_of_others((repr(name), value) for name, value in state_dict.items())
        state = self._engine.state
        infos_elsewhere = [info for info in state.everything() if not state.is_here(info.names[0])]
        elsewhere = {name for info in infos_elsewhere for name in info.names}
        is_whole = not state_dict.keys().isdisjoint(elsewhere)
        persistent = [info.names for info in infos_elsewhere if info.persistent and is_whole]
        missing = [names[0] for names in persistent if state_dict.keys().isdisjoint(names)]
        if strict and missing:
            kind = type(self._engine.model).__name__
            raise RuntimeError(f"Error in loading state_dict for {kind}: missing on another pipeline stage: {missing}")
        here = {name: value for name, value in state_dict.items() if name not in elsewhere}
        here = dict(take_extra_states(self._engine.model, here))
        if not are_subclasses_dispatched():  # in torch 2.11 nothing plain is copied to a DTensor
            mine = self.state_dict()  # type: ignore[attr-defined]
            whole = [
                name
                for name in here
                if name in mine and isinstance(mine[name], DTensor) != isinstance(here[name], DTensor)
            ]
            state.load_full_state_dict({name: here[name] for name in whole}, strict=False)
            here |= {name: mine[name] for name in whole}
        result = super().load_state_dict(here, strict=strict, assign=assign)  # type: ignore[misc]
        result.missing_keys.extend(missing)
        return result

    @property
    def original(self) -> torch.nn.Module:
        """The model that it was made from, its modules and settings without data; to be read, not changed."""
        return self._engine.model

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter (with a ``precision`` of its own: that of the masters)."""
        parameters = (info.owner_dtype for info in self._engine.state.everything() if info.is_parameter)
        return next((dtype for dtype in parameters if dtype.is_floating_point), torch.get_default_dtype())

    @property
    def device(self) -> torch.device:
        """The device that this rank's shards are on."""
        return self._engine.layout.device

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Elements of the whole model's parameters, each counted once, on whatever rank they are."""
        state = self._engine.state
        embeddings = {
            f"{path}.weight"
            for path, module in self._engine.model.named_modules()
            if exclude_embeddings and isinstance(module, torch.nn.Embedding)
        }
        return sum(
            torch.Size(info.shape).numel()
            for info in state.everything()
            if info.is_parameter and not embeddings.intersection(info.names) and (info.trainable or not only_trainable)
        )

    def generate(self, *args: Any, gathered: bool = False, **kwargs: Any) -> Any:
        """Generate as the original does, sharded, all ranks together; what is generated is returned on all.

        The mesh's first rank may call it alone: the others join in where they come to another call.

        The loop is transformers' own and runs on the mesh's first rank: its arguments count, it draws the random
        numbers, and calls processors, stopping criteria and the streamer. Each step of it runs on all ranks: one
        program for a prompt, one for each token behind it, over a cache that is cut over heads, layers and samples.

        Args:
            gathered: gather the weights and generate with the whole model: each rank holds all of it meanwhile.

        Raises:
            ValueError: on all ranks, if the model does not generate, or not with a cache that can be cut, and for
                arguments that need more than logits of the programs.
        """
        engine = self._engine
        if not callable(getattr(engine.model, "generate", None)):
            raise ValueError(f"{type(engine.model).__name__} has no generate: only models of transformers that do can")
        if "synced_gpus" in kwargs:
            kwargs["synced_gpus"] = False  # one rank runs the loop, so none waits for another

        name = f"generate({'gathered=True' if gathered else ''})"

        def generate(gathered: bool) -> Any:
            return self._generate(args, kwargs, gathered)

        if engine.ranks.is_alone or is_first_rank(engine.places.device_mesh):
            return self.call_joined(name, generate, gathered=gathered)
        engine.calls.check(f"calls {name}")
        return generate(gathered)

    def _join_generation(self, gathered: bool) -> None:
        """Run what the loop on the first rank asks for, which gave the arguments."""
        self._generate((), {}, gathered)

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any], gathered: bool) -> Any:
        engine = self._engine
        if gathered or engine.plan is None:
            return _generated_whole(engine, args, kwargs)
        from runtime.generation.sharded_generation import generated

        return generated(engine, args, kwargs)

    def cache_bytes(self, batch: int | None = None, length: int | None = None, source_length: int | None = None) -> int:
        """Bytes that this rank's key-value cache takes; without arguments those of the one that generated last.

        Args:
            batch: samples times beams.
            length: tokens of prompt and answer together; the cache has a multiple of 32 slots.
            source_length: tokens of the encoder's input, for a model that has one; frames and the like are taken to be
                as many as in the example.

        Raises:
            ValueError: for a model that does not generate sharded, without a plan, and for sizes that are missing.
        """
        from runtime.generation.sharded_generation import cache_bytes

        return cache_bytes(self._engine, batch, length, source_length)


def _generated_whole(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the first rank generates with the whole model."""
    is_first = is_first_rank(engine.places.device_mesh)
    if is_first and not engine.ranks.is_alone:
        why = "there is no plan yet, which a first call makes" if engine.plan is None else "gathered=True"
        print(f"meshwright: generate runs the whole model on the first rank ({why})", file=sys.stderr)
    model = whole_model(engine.model, engine.state)

    def generate() -> Any:
        call: Any = model.generate
        return call(*args, **kwargs) if is_first else None

    message = [engine.ranks.together(generate)]
    if not engine.ranks.is_alone:
        broadcast_objects(message, engine.places.device_mesh)
    return message[0]


class LikeOriginal:
    """Decorates ``forward``: ``inspect.signature`` shows it with the arguments of the original's.

    ``torch.compile`` of the module leaves it as it is: the programs that it runs were captured already.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = torch.compiler.disable(function)
        self.__doc__ = function.__doc__

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self._function if module is None else _BoundForward(self._function, module)


class _BoundForward:
    """The forward of one parallel module."""

    def __init__(self, function: Callable[..., Any], module: Any) -> None:
        self._function, self.__self__ = function, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__._engine.model.forward)


def _refuser(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{name} does not go with a model that is sharded: {REFUSED_METHODS[name]}")

    return refuse
