"""How a fused operator is registered with torch: schema, implementations, shapes, gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes.torch_compat import host_operators  # noqa: F401
from passes.torch_compat.operators import OpOverload
from passes.torch_compat.operators import schema as schema_of
from runtime.kernels.definitions import definition_for_compiler
from runtime.kernels.device import common_device, on_device
from runtime.kernels.direct import apply_of, are_plain, is_dynamo_compiling, nobody_listens
from runtime.kernels.dispatch import is_forced, runs_triton
from runtime.kernels.promotion import known_promotion_of
from runtime.torch_compat.dispatcher import any_requires_grad, has_saved_tensor_hooks

NAMESPACE = "meshwright"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


class FusedOperator:
    """``torch.ops.meshwright.<name>``, called at once where nobody listens to the dispatcher (``direct``).

    Args:
        overload: the operator as torch knows it.
        run: computes it from tensors with data.
    """

    def __init__(self, overload: OpOverload, run: Callable[..., Any]) -> None:
        self.overload = overload
        self._run = run
        self._num_arguments = len(schema_of(overload).arguments)
        self._name = schema_of(overload).name.partition("::")[2]
        self._apply: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if is_dynamo_compiling():
            definition = definition_for_compiler(self._name, arguments[0])
            return (definition or self.overload)(*arguments)
        if len(arguments) != self._num_arguments or not (nobody_listens() and are_plain(arguments)):
            return self.overload(*arguments)
        if torch.is_grad_enabled() and any_requires_grad(*arguments):
            return self.overload(*arguments) if self._apply is None else self._apply(*arguments)
        return self._run(*arguments)

    def differentiate(self, save: Callable[..., None], backward: Callable[..., Any]) -> None:
        """See ``differentiable``."""
        torch.library.register_autograd(self.overload, backward, setup_context=save, lib=_LIBRARY)
        run = self._run

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = run(*arguments)
            save(ctx, arguments, output)
            return output

        name = schema_of(self.overload).name.replace("::", "_")
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._apply = apply_of(type(name, (torch.autograd.Function,), methods))


def register(
    schema: str, *, aten: Callable[..., Any], triton: Callable[..., Any], shapes: Callable[..., Any]
) -> FusedOperator:
    """Define ``torch.ops.meshwright.<name>``; which implementation runs is decided at each call, by the first tensor.

    Args:
        schema: ``"swiglu(Tensor gate, Tensor up) -> Tensor"``.
        aten: the operator as torch operators; also runs on subclasses and in modes, rank by rank.
        triton: the same as kernels.
        shapes: gives outputs of the right shape and dtype without computing (the fake implementation).
    """
    name = schema.partition("(")[0]

    run = _dispatched(name, aten=aten, triton=triton)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    return FusedOperator(getattr(getattr(torch.ops, NAMESPACE), name).default, run)


def register_composed(
    schema: str, *, differentiable: Callable[..., Any], plain: Callable[..., Any], shapes: Callable[..., Any]
) -> None:
    """Define ``torch.ops.meshwright.<name>``, made of operators that are registered, under a gradient of its own.

    Args:
        differentiable: ``apply`` of an ``autograd.Function``, which takes the arguments of the schema.
        plain: gives the output without a gradient.
        shapes: as of ``register``.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    defaults = [argument.default_value for argument in schema_of(overload).arguments]

    def all_arguments(arguments: Sequence[Any]) -> tuple[Any, ...]:
        return (*arguments, *defaults[len(arguments) :])

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, lambda *arguments: plain(*all_arguments(arguments)), key)
    _LIBRARY.impl(name, lambda *arguments: differentiable(*all_arguments(arguments)), "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_LIBRARY)


def _dispatched(name: str, *, aten: Callable[..., Any], triton: Callable[..., Any]) -> Callable[..., Any]:
    """``aten`` or ``triton``, by the first argument (a tensor); kernels run on the device of the tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not runs_triton(args[0]):
            return aten(*args, **kwargs)
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        with on_device(common_device(name, tensors)):
            return triton(*args, **kwargs)

    return run


def differentiable(operator: FusedOperator, *, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Give ``operator`` its gradient.

    Args:
        save: ``save(ctx, inputs, output)`` keeps for backward what that needs, as little as it can.
        backward: ``backward(ctx, *grads)`` gives the gradient of every input (None for those without), by calling
            operators of this library, so that a compiler sees one call.
    """
    operator.differentiate(save, backward)


def differentiable_again(operator: FusedOperator, plain: Callable[..., Any]) -> None:
    """Give a ``<name>_backward`` operator a gradient of its own, so that derivatives of any order are right.

    It is that of ``plain``, which is run again: second derivatives are rare, and may cost what torch's operators do.

    Args:
        plain: takes the operator's arguments and gives its outputs (None for those not requested) by operators of
            torch alone, with whatever they depend on computed from the arguments; see ``gradients_of``.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [argument if isinstance(argument, torch.Tensor) else None for argument in inputs]
        ctx.save_for_backward(*tensors)
        ctx.constants = [None if isinstance(argument, torch.Tensor) else argument for argument in inputs]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = [_apart(tensor, again=again) for tensor in ctx.saved_tensors]
            arguments = [constant if tensor is None else tensor for tensor, constant in zip(leaves, ctx.constants)]
            results = plain(*arguments)
            results = results if isinstance(results, tuple) else (results,)
            pairs = [
                (result, grad)
                for result, grad in zip(results, grads, strict=True)
                if result is not None and grad is not None and result.requires_grad
            ]
            inputs_with_grad = [tensor for tensor in leaves if tensor is not None and tensor.requires_grad]
            outputs, upstream = [result for result, _ in pairs], [grad for _, grad in pairs]
            gradients = iter(
                torch.autograd.grad(outputs, inputs_with_grad, upstream, create_graph=again, allow_unused=True)
                if pairs
                else [None] * len(inputs_with_grad)
            )
        return tuple(None if tensor is None or not tensor.requires_grad else next(gradients) for tensor in leaves)

    differentiable(operator, save=save, backward=backward)


def _apart(tensor: torch.Tensor | None, *, again: bool) -> torch.Tensor | None:
    """A separate tensor for autograd: its gradients are not passed on to the tensor it was made of."""
    if tensor is None or not tensor.requires_grad:
        return tensor
    return tensor.view_as(tensor) if again else tensor.detach().requires_grad_()


def gradients_of(
    definition: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor | None], grad: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of ``definition(*tensors)``, which can be differentiated again; None for tensors that are None."""
    leaves = [
        tensor if tensor is None or tensor.requires_grad else tensor.detach().requires_grad_() for tensor in tensors
    ]
    inputs_with_grad = [tensor for tensor in leaves if tensor is not None]
    gradients = iter(torch.autograd.grad(definition(*leaves), inputs_with_grad, grad, create_graph=True))
    return tuple(None if tensor is None else next(gradients) for tensor in leaves)


#: Dtypes in which fused operators compute without widening.
WIDE = frozenset({torch.float32, torch.float64})


def is_torchs_own(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether torch's operators, under autograd, do what ours would with these floating-point tensors, and as well.

    They do on a processor, where ours are made of them, on tensors of one dtype that needs no widening, and where
    nobody listens to operators; they are called with less of Python in between. Not inside of checkpoints, which want
    the same tensors kept when a region runs again, and then may be listening.
    """
    return (
        first.is_cpu
        and first.dtype in WIDE
        and _have_dtype(first.dtype, others)
        and not runs_triton(first)
        and _is_unobserved(first, *others)
    )


#: A GPU treats so many bytes in fewer microseconds than the host takes longer to launch a kernel of ours than torch's.
_FEW_BYTES = 2**24


def is_torchs_on_gpu(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether torch's own kernels are to normalize tensors on a GPU, under autograd: of one dtype, and few bytes.

    For operators that torch has kernels of, which compute as ours do, in float32 or wider, and take the host a third of
    the time. What a GPU would save with ours on so few bytes is less; a step of small tensors waits for the host.
    """
    return (
        first.is_cuda
        and first.numel() * first.itemsize <= _FEW_BYTES
        and _have_dtype(first.dtype, others)
        and not is_forced()
        and _is_unobserved(first, *others)
    )


def _have_dtype(dtype: torch.dtype, tensors: Sequence[torch.Tensor | None]) -> bool:
    return all(tensor is None or tensor.dtype is dtype for tensor in tensors)


def _is_unobserved(*tensors: torch.Tensor | None) -> bool:
    """Whether nobody can tell by which operators these are computed."""
    return nobody_listens() and not has_saved_tensor_hooks() and are_plain(tensors)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In at least float32, as every fused operator computes."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def promoted(*tensors: torch.Tensor | None, least: torch.dtype | None = None) -> torch.dtype:
    """The dtype that the tensors (None is left out) and ``least`` promote to."""
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None]
    return known_promotion_of(*dtypes) if least is None else known_promotion_of(least, *dtypes)


def wide_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The type in which a fused operator computes: that to which its operands promote, but at least float32."""
    return promoted(*tensors, least=torch.float32)


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor.to(dtype)``, which takes as long as an addition where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)
