"""DTensors that were computed from one parameter of a parallel module: gradients, state of optimizers.

They differ from other DTensors in five ways. Partial sums are completed before operators in place, which DTensor
refuses, before they are read as numbers, which DTensor forgets (Adafactor does both), and before operators that DTensor
computes wrongly of parts (``partial_values``). Plain tensors beside them
count as whole (transformers' Adafactor has such state). What DTensor has no rule for, and writes to views that it
gathers, are what they are on one device (``whole_tensors``), and so is what is drawn at random (``drawn_tensors``). And
with a pipeline they refuse to be combined with those
of other parameters: a rank has the parameters of its own stage alone, and DTensor knows no axis of other parameters, so
the norm that ``torch.nn.utils.clip_grad_norm_`` clips by would be the stage's. What is computed from each parameter for
itself, as optimizers do, is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from passes.torch_compat.operators import schema, tree_leaves
from runtime.parameters.drawn_tensors import draws, run_drawn
from runtime.parameters.lent_state import LentState
from runtime.parameters.partial_values import incomplete_operands
from runtime.parameters.plain_operands import is_plain, with_whole_operands
from runtime.parameters.saved_parts import note_rank
from runtime.parameters.turned_tensors import TURNING, turned_in_place
from runtime.parameters.whole_tensors import (
    GatheredView,
    can_run_whole,
    gathered_views,
    has_empty_parts,
    run_whole,
    write_back,
    written_tensors,
)
from runtime.torch_compat.dtensors import (
    are_subclasses_dispatched,
    as_dtensors,
    dtensor_over,
    has_no_rule,
    local_part,
    set_content,
    spec_of,
)

#: Operators on lists work on each place of the lists for itself.
_ON_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
#: Operators that put tensors side by side, even where a stage has but one.
_JOINING = ("stack", "cat")
#: What reads a number (``item``), which DTensor does on each rank's own part.
_READING = ("_local_scalar_dense", "item")

#: Which DTensor runs on parts though masks are of the whole, or asks ranks of other stages for.
_ALWAYS_WHOLE = ("index_put", "index_put_", "equal")
#: What has no value of no elements: it would fail on the ranks alone that have no part of a small tensor.
_OF_SOME_ELEMENTS = frozenset(
    {
        *("max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "median", "nanmedian", "mode", "kthvalue"),
        *("norm", "linalg_vector_norm", "logsumexp", "cummax", "cummin", "topk", "histc"),
    }
)
#: Operators on lists, without what their names begin with, that compute such a thing of each.
_OF_EACH: dict[str, Callable[..., torch.Tensor]] = {
    "norm": lambda tensor, order=2, dtype=None: torch.linalg.vector_norm(tensor, order, dtype=dtype),
    "max": torch.max,
}
#: Functions that draw random numbers.
_DRAWING = frozenset(
    {
        *("normal", "uniform", "random", "bernoulli", "exponential", "cauchy", "geometric", "log_normal", "dropout"),
        *("rand_like", "randn_like", "randint_like", "multinomial", "poisson", "alpha_dropout", "feature_dropout"),
    }
)
#: How ``tensor.grad`` and the like come to ``__torch_function__``.
_ATTRIBUTES = ("__get__", "__set__")


class ParameterTensor(DTensor):
    """A DTensor that was computed from one parameter.

    Attributes:
        path: the parameter's name.
        of_stage: whether ranks of other pipeline stages have other parameters.
        origin: what it is a view of, where it has memory of its own.
        lent: of optimizer state, what the last step was lent of it and its neighbours.
    """

    path: str
    of_stage: bool
    origin: GatheredView | None = None
    lent: LentState | None = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::")
        if name.split(".")[0] in TURNING and isinstance(args[0], ParameterTensor):
            return turned_in_place(func, args, kwargs)
        if _is_of_each(name, args):
            each = _OF_EACH[name.split(".")[0].removeprefix(_ON_LISTS[0])]
            return [each(one, *args[1:], **kwargs) for one in args[0]]
        in_place = schema(func).is_mutable and bool(args)
        tensors = _prepared(name, args, kwargs, in_place=in_place)
        whole_args, whole_kwargs = with_whole_operands((args, kwargs), tensors[0]) if tensors else (args, kwargs)
        is_drawn = bool(tensors) and draws(func)
        ran_whole = is_drawn or (bool(tensors) and _needs_whole(func, name.split(".")[0], tensors))
        if not ran_whole:
            try:
                result = super().__torch_dispatch__(func, types, whole_args, whole_kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if not (tensors and has_no_rule(error) and can_run_whole(func, tensors)):
                    raise
                ran_whole = True
        if ran_whole:
            _complete(written_tensors(func, args, kwargs))
            run = run_drawn if is_drawn else run_whole
            result = run(func, whole_args, whole_kwargs, tensors[0])
        if in_place and is_plain(args[0]):
            return args[0]  # whose memory was written
        result = _of_parameters(name, result, args, tensors, in_place=in_place)
        if func.is_view and isinstance(args[0], ParameterTensor):
            _remember_origins(func, args, kwargs, result, ran_whole=ran_whole)
        elif in_place:
            _write_to_origins(written_tensors(func, args, kwargs))
        return result

    if not are_subclasses_dispatched():

        @classmethod
        def __torch_function__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            """As ``__torch_dispatch__``, a level above: what has a history is left as it is."""
            kwargs = kwargs or {}
            name = getattr(func, "__name__", "")
            if name in _ATTRIBUTES or func in (torch.autograd.grad, torch.autograd.backward):  # no operators
                with as_dtensors():
                    return func(*args, **kwargs)
            in_place = name.endswith("_") and not name.endswith("__") and bool(args)
            _refuse_draws(name, args, kwargs)
            tensors = _prepared(name, args, kwargs, in_place=in_place)
            with as_dtensors():
                result = func(*args, **kwargs)
                if any(isinstance(one, DTensor) and one.requires_grad for one in tree_leaves(result)):
                    return result
                return _of_parameters(name, result, args, tensors, in_place=in_place)

    def complete(self) -> None:
        """Add up partial sums, in place."""
        placements = spec_of(self).placements
        if any(placement.is_partial() for placement in placements):
            plain: DTensor = dtensor_over(DTensor, local_part(self), spec_of(self))
            whole = [Replicate() if placement.is_partial() else placement for placement in placements]
            set_content(self, plain.redistribute(placements=whole))

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Hold ``values``: DTensor would leave this rank's part as it is."""
        name = f"a gradient or of state of {self.path!r}"
        self.refuse_unlike(values, name=name, advice="give values of that shape and dtype")
        local_part(self).data = self.memory_of(values)

    def refuse_unlike(self, values: torch.Tensor, *, name: str, advice: str) -> None:
        """Raise ValueError if ``values``, which are to be the data of ``name``, have another shape or dtype."""
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ValueError(
                f"data of {name} is {self.dtype} of shape {list(self.shape)}, and cannot be {values.dtype} of "
                f"shape {list(values.shape)}: {advice}"
            )

    def memory_of(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``values``, itself where it lies as this tensor does."""
        same = isinstance(values, DTensor) and (values.placements, values.device_mesh) == (
            self.placements, self.device_mesh,
        )  # fmt: skip
        if same and local_part(values).is_contiguous():  # type: ignore[arg-type]
            return local_part(values).detach()  # type: ignore[arg-type]
        with torch.no_grad():
            return local_part(torch.empty_like(self).copy_(values))  # type: ignore[arg-type]

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole values; an array that cannot be written where it is not the tensor's own memory."""
        array = self.full_tensor().numpy(force=force)
        if not all(placement.is_replicate() for placement in spec_of(self).placements):
            array.flags.writeable = False
        return array

    def __format__(self, format_spec: str) -> str:
        return format(self.item(), format_spec) if self.dim() == 0 else super().__format__(format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of this rank's part: torch 2.11 copies no DTensor of another class, and later ones all attributes."""
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # which refuses
        if id(self) not in memo:
            copied = of_parameter_over(local_part(self).detach().clone(), spec_of(self), self)
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        local = local_part(self).detach()
        if (
            local.untyped_storage().nbytes() > local.nbytes
        ):  # files would hold it all, and torch saves no DTensor inside
            local = local.clone()
        plain: DTensor = dtensor_over(DTensor, local, spec_of(self))
        return note_rank(plain).__reduce_ex__(protocol)


def _prepared(name: str, args: Any, kwargs: Any, *, in_place: bool) -> list[ParameterTensor]:
    """The tensors of an operator that may run; what it writes to or reads from is added up.

    Raises:
        ValueError: if it combines those of several parameters of a pipeline's stage.
    """
    on_lists = name.startswith(_ON_LISTS)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ParameterTensor)]
    if not on_lists and any(tensor.of_stage for tensor in tensors):
        _refuse_several(name, tensors)
    if in_place or name in _READING:
        _complete(args[0] if on_lists else args[:1])
    _complete(incomplete_operands(name.split(".")[0], args, kwargs, tensors))
    return tensors


def _is_of_each(name: str, args: Any) -> bool:
    """Whether an operator on a list would fail on ranks alone that have no part of one of the tensors."""
    if not name.startswith(_ON_LISTS[0]) or name.split(".")[0].removeprefix(_ON_LISTS[0]) not in _OF_EACH:
        return False
    return any(has_empty_parts(spec_of(one)) for one in args[0] if isinstance(one, DTensor))


def _needs_whole(func: Any, name: str, tensors: Sequence[ParameterTensor]) -> bool:
    """Whether an operator on each rank's part would not give parts of what it gives of whole ``tensors``."""
    if name in _ALWAYS_WHOLE or _fills_out(func):
        return True
    return name in _OF_SOME_ELEMENTS and any(has_empty_parts(spec_of(tensor)) for tensor in tensors)


@functools.cache
def _fills_out(func: Any) -> bool:
    """Whether an operator writes its result to ``out``: DTensor computes a part's shape for the whole (``eye``)."""
    return any(
        argument.kwarg_only and (info := argument.alias_info) and info.is_write for argument in schema(func).arguments
    )


def _refuse_draws(name: str, args: Any, kwargs: Any) -> None:
    """Raise ValueError, in torch 2.11, for numbers that every rank would draw for its own part."""
    if name.strip("_") in _DRAWING and any(isinstance(leaf, ParameterTensor) for leaf in tree_leaves((args, kwargs))):
        raise ValueError(
            f"{name} of a parallel module's parameter would draw other numbers than on one device under torch 2.11: "
            "draw a plain tensor of its shape from one seed on all ranks, and copy_ it"
        )


def _complete(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        if isinstance(tensor, ParameterTensor):
            tensor.complete()


def _remember_origins(func: Any, args: Any, kwargs: Any, result: Any, *, ran_whole: bool) -> None:
    """Let views that have memory of their own know what they are of."""
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, ParameterTensor)]
    of_view = ran_whole or args[0].origin is not None
    for one, origin in zip(results, gathered_views(func, args, kwargs, results, of_view=of_view), strict=True):
        if origin is not None:
            one.origin = origin


def _write_to_origins(written: Iterable[Any]) -> None:
    for tensor in written:
        while isinstance(tensor, ParameterTensor) and tensor.origin is not None:
            source = tensor.origin.source
            _complete([source])
            write_back(tensor, tensor.origin)
            tensor = source


def _of_parameters(name: str, result: Any, args: Any, tensors: Sequence[ParameterTensor], *, in_place: bool) -> Any:
    """Results of an operator as computed from the parameters that its ``tensors`` were."""
    if name.startswith(_ON_LISTS):
        return _each_of(result, args[0])
    if in_place and isinstance(args[0], ParameterTensor) and isinstance(result, DTensor):
        return args[0]
    if isinstance(result, (tuple, list)):
        return type(result)(of_parameter(one, tensors[0]) for one in result)
    return of_parameter(result, tensors[0])


def of_parameter(value: Any, source: ParameterTensor) -> Any:
    """``value``, if it is a DTensor, as one that was computed from the parameter that ``source`` was."""
    return of_parameter_over(local_part(value), spec_of(value), source) if isinstance(value, DTensor) else value


def of_parameter_over(local: torch.Tensor, spec: Any, source: ParameterTensor) -> ParameterTensor:
    """A DTensor over ``local`` as one that was computed from the parameter that ``source`` was."""
    tensor: ParameterTensor = dtensor_over(ParameterTensor, local, spec)
    tensor.path, tensor.of_stage = source.path, source.of_stage
    return tensor


def _each_of(results: Any, sources: Sequence[Any]) -> Any:
    """Results of an operator on lists, each from the same place of ``sources``."""
    if not isinstance(results, (tuple, list)) or len(results) != len(sources):
        return results
    return type(results)(
        of_parameter(result, source) if isinstance(source, ParameterTensor) else result
        for result, source in zip(results, sources)
    )


def _refuse_several(name: str, tensors: Sequence[ParameterTensor]) -> None:
    paths = list(dict.fromkeys(tensor.path for tensor in tensors))
    if len(paths) == 1 and name not in _JOINING:
        return
    raise ValueError(
        f"{name} combines {' and '.join(map(repr, paths[:2]))}, but with a pipeline a rank has the parameters of its "
        "own stage only, so the result would be the stage's and not the model's: clip by parallel.clip_grad_norm_, or "
        "combine what full_gradients() and full_state_dict() give"
    )
