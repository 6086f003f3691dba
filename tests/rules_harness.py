"""Runs one operator whole and on shards, forward and backward, and compares: the proof of a sharding rule.

Shards live in ``LocalTensorMode`` on a fake process group of four ranks, a mesh of axes ``a`` and ``b`` of two; every
rank's part is float64. The same source is also run under ``spmd_types``' checker on meta tensors.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes.emit.expressions import LocalCall, expression
from passes.emit.expressions import LocalTensor as Operand
from passes.ir import conversions
from passes.ir.graph import Node, Ref, Value
from passes.ir.types import I, MeshShape, P, Placement, R, local_shape, shard_dim
from passes.rules import rule_for
from passes.rules.rule import AxisChoice, ShardingRule, axis_choices, cuts_in_order
from runtime import kernels, ops
from runtime.mesh.joint_axes import forget, remember
from runtime.mesh.layout import part_of

MESH = MeshShape(("a", "b"), (2, 2))
RANKS = 4
DUAL = {R: P, P: R, I: I}
LETTERS = {R: spmd.R, I: spmd.I, P: spmd.P}


#: Special functions that torch has no derivative of.
WITHOUT_DERIVATIVE = [
    "airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
    "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
    "spherical_bessel_j0",
]  # fmt: skip

#: Operands that a float operator has no derivative for: places among its tensors (from the end if negative), or None
#: for all of them.
WITHOUT_GRADIENT: dict[str, tuple[int, ...] | None] = {
    "aten.bernoulli.default": None,
    **dict.fromkeys(("aten.floor_divide.default", "aten.heaviside.default", "aten.histc.default"), None),
    **dict.fromkeys(("aten.nextafter.default", "aten.linalg_ldl_factor.default"), None),
    **{f"aten.special_{name}.default": None for name in WITHOUT_DERIVATIVE},
    # ambiguous by a phase, which a loss must not depend on
    "aten.linalg_eig.default": None,
    **dict.fromkeys(("aten.igamma.default", "aten.igammac.default", "aten.special_zeta.default"), (0,)),
    **dict.fromkeys(("aten.margin_ranking_loss.default", "aten.cosine_embedding_loss.default"), (2,)),
    "aten.hinge_embedding_loss.default": (1,),
    "aten.multi_margin_loss.default": (2,),
    "aten.instance_norm.default": (3, 4),
    "aten.fake_quantize_per_tensor_affine.tensor_qparams": (1, 2),
    "aten.fake_quantize_per_channel_affine.default": (1, 2),
    **dict.fromkeys(("aten.copy.default", "aten.copy_.default"), None),
    "aten.batch_norm.default": (-2, -1),
    "aten.binary_cross_entropy.default": (1, 2),
    "aten.binary_cross_entropy_with_logits.default": (2,),
    "aten.soft_margin_loss.default": (1,),
}


@contextmanager
def fake_mesh() -> Iterator[DeviceMesh]:
    """A 2 × 2 mesh on a fake process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", MESH.sizes, mesh_dim_names=MESH.names)
        remember(mesh)
        yield mesh
        forget(mesh)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Sample:
    """One call of an operator on whole tensors."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Case:
    """A sample as a node, with its tensors and what the operator gives on them."""

    node: Node
    tensors: list[torch.Tensor]
    grads: list[bool]
    outputs: list[torch.Tensor]
    out_grads: list[bool]
    upstream: list[torch.Tensor]
    input_gradients: list[torch.Tensor]

    @property
    def values(self) -> dict[str, Value]:
        return {
            f"t{place}": Value(f"t{place}", tuple(t.shape), _dtype(t), requires_grad=grad)
            for place, (t, grad) in enumerate(zip(self.tensors, self.grads))
        }


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def reference(op: str, args: Any, kwargs: Any) -> Any:
    """The operator on whole tensors, by torch itself."""
    if op == "meshwright.cross_entropy":
        logits, target = args
        flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), reduction="none", **kwargs)
        return flat.reshape(target.shape)
    if op == "meshwright.expert_linear":
        rows, ids, weight = args
        return torch.einsum("...i,...oi->...o", rows, weight[ids])
    if op == "aten.empty_like.default":  # promises no values: the programs' zeros do
        return torch.zeros_like(*args, **kwargs)
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs)


def make_case(sample: Sample) -> Case:
    """Run a sample whole, forward and backward."""
    tensors: list[torch.Tensor] = []
    total = sum(
        isinstance(item, torch.Tensor) for item in torch.utils._pytree.tree_leaves((sample.args, sample.kwargs))
    )

    def visit(item: Any, computed: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return computed(item)
        if isinstance(item, (list, tuple)):
            return type(item)(visit(part, computed) for part in item)
        return item

    def collect(tensor: torch.Tensor) -> Ref:
        leaf = tensor.detach().clone()
        without = WITHOUT_GRADIENT.get(sample.op, ())
        place = len(tensors)
        has_gradient = leaf.is_floating_point() and without is not None and not {place, place - total} & set(without)
        tensors.append(leaf.requires_grad_(has_gradient))
        return Ref(f"t{len(tensors) - 1}")

    def dtype_as_text(item: Any) -> Any:
        return f"dtype:{str(item).removeprefix('torch.')}" if isinstance(item, torch.dtype) else item

    args = tuple(dtype_as_text(visit(item, collect)) for item in sample.args)
    kwargs = {name: dtype_as_text(visit(item, collect)) for name, item in sample.kwargs.items()}
    leaves = iter(tensors)
    whole = reference(
        sample.op,
        tuple(visit(item, lambda _: next(leaves)) for item in sample.args),
        {name: visit(item, lambda _: next(leaves)) for name, item in sample.kwargs.items()},
    )
    outputs = list(whole) if isinstance(whole, (list, tuple)) else [whole]
    out_grads = [output.requires_grad for output in outputs]
    upstream = [torch.randn(output.shape, dtype=torch.float64).to(output.dtype) for output in outputs]
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    upstream_pairs = [(output, grad) for output, grad, has in zip(outputs, upstream, out_grads) if has]
    computed: list[Any] = [None] * len(inputs)
    if upstream_pairs and inputs:
        computed = list(
            torch.autograd.grad(
                [o for o, _ in upstream_pairs], inputs, [g for _, g in upstream_pairs], allow_unused=True
            )
        )
    remaining_grads = iter(computed)
    gradients = [
        _or_zero(next(remaining_grads), tensor) if tensor.requires_grad else torch.zeros(()) for tensor in tensors
    ]
    values = tuple(
        Value(f"o{place}", tuple(output.shape), _dtype(output), requires_grad=output.requires_grad)
        for place, output in enumerate(outputs)
    )
    node = Node("n", sample.op, args, kwargs, values)
    return Case(
        node,
        tensors,
        [tensor.requires_grad and bool(upstream_pairs) for tensor in tensors],
        [output.detach() for output in outputs],
        out_grads,
        upstream,
        gradients,
    )


def _or_zero(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def distribute(whole: torch.Tensor, placement: Placement) -> dict[int, torch.Tensor]:
    """Each rank's part of a tensor; partial sums are split at random."""
    parts = {(): whole}
    for size, spmd_type in zip(MESH.sizes, placement):
        parts = {
            (*place, number): piece
            for place, part in parts.items()
            for number, piece in enumerate(_pieces(part, size, spmd_type))
        }
    return {rank: parts[place].clone() for rank, place in enumerate(itertools.product(*map(range, MESH.sizes)))}


def _pieces(part: torch.Tensor, count: int, spmd_type: str) -> Sequence[torch.Tensor]:
    dim = shard_dim(spmd_type)
    if dim is not None:
        return part.chunk(count, dim)
    if spmd_type != P:
        return [part] * count
    if not part.is_floating_point():
        return [part, *(torch.zeros_like(part) for _ in range(count - 1))]
    others = [torch.randn_like(part) for _ in range(count - 1)]
    return [part - sum(others), *others]


def assemble(parts: dict[int, torch.Tensor], placement: Placement, *, exact: bool) -> torch.Tensor:
    """The whole tensor from each rank's part; raises if copies differ (by more than float32 does if not ``exact``)."""
    level = {place: parts[rank] for rank, place in enumerate(itertools.product(*map(range, MESH.sizes)))}
    for spmd_type in reversed(placement):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for place, part in level.items():
            groups.setdefault(place[:-1], []).append(part)
        level = {place: _joined(pieces, spmd_type, exact) for place, pieces in groups.items()}
    return level[()]


def _joined(pieces: list[torch.Tensor], spmd_type: str, exact: bool) -> torch.Tensor:
    dim = shard_dim(spmd_type)
    if dim is not None:
        return torch.cat(pieces, dim)
    if spmd_type == P:
        return sum(pieces[1:], pieces[0])
    for piece in pieces[1:]:
        _assert_close(piece, pieces[0], "copies on several ranks", exact)
    return pieces[0]


def legal_choices(case: Case, rule: ShardingRule) -> list[AxisChoice]:
    """Choices that one axis may take."""
    choices = axis_choices(rule, input_grads=case.grads, output_grads=case.out_grads)
    return [choice for choice in choices if divides(case, rule, (choice, choices[0]))]


def divides(case: Case, rule: ShardingRule, choices: Sequence[AxisChoice]) -> bool:
    """Whether the mesh axes together divide the factors and the tensors that they cut, in an order that may be."""
    pieces: dict[str, int] = {}
    for size, choice in zip(MESH.sizes, choices):
        if choice.factor is not None and choice.factor not in rule.inner:
            pieces[choice.factor] = pieces.get(choice.factor, 1) * size
    placements = zip(*((*choice.inputs, *choice.outputs) for choice in choices))
    whole = (conversions.divides(p, tuple(t.shape), MESH) for p, t in zip(placements, (*case.tensors, *case.outputs)))
    return cuts_in_order(rule, choices) and all(whole) and all(rule.sizes[f] % n == 0 for f, n in pieces.items())


def local_call(case: Case, rule: ShardingRule, choices: tuple[AxisChoice, ...]) -> LocalCall:
    """The call that one rank makes under ``choices`` (one per mesh axis)."""

    def operand(name: str, tensor: torch.Tensor, grad: bool, placement: Placement) -> Operand:
        shape = tuple(tensor.shape)
        return Operand(name, local_shape(shape, placement, MESH), shape, placement, grad, _dtype(tensor))

    inputs = tuple(
        operand(f"t{place}", tensor, grad, tuple(choice.inputs[place] for choice in choices))
        for place, (tensor, grad) in enumerate(zip(case.tensors, case.grads))
    )
    outputs = tuple(
        operand(f"o{place}", tensor, grad, tuple(choice.outputs[place] for choice in choices))
        for place, (tensor, grad) in enumerate(zip(case.outputs, case.out_grads))
    )
    return LocalCall(case.node, inputs, outputs, choices, MESH, rule)


#: What an expression may name beside its operands, and what of it computes on one rank alone.
_LOCAL = {"torch": torch, "F": F, "kernels": kernels, "math": math, "self": None}
_NAMES = {**_LOCAL, "spmd": spmd, "ops": ops, "I": spmd.I, "P": spmd.P, "R": spmd.R, "S": spmd.S, "V": spmd.V}


def evaluate(source: str, operands: dict[str, Any]) -> list[Any]:
    result = eval(source, dict(_NAMES), operands)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _computes_on_one_rank_alone(source: str) -> bool:
    names = {node.id for node in ast.walk(ast.parse(source, mode="eval")) if isinstance(node, ast.Name)}
    return not names & (set(_NAMES) - set(_LOCAL))


#: A tensor's part on each rank.
Parts = dict[int, torch.Tensor]


def run_on_shards(mesh: DeviceMesh, case: Case, call: LocalCall, source: str) -> tuple[list[Parts], list[Parts | None]]:
    """Outputs, and gradients of the inputs that have one (None: zeros), by rank.

    Without communication each rank computes by itself: ``LocalTensorMode`` takes many times as long.
    """
    inputs = [distribute(t.detach(), operand.placement) for operand, t in zip(call.inputs, case.tensors)]
    upstream = [distribute(grad, _dual(operand.placement)) for operand, grad in zip(call.outputs, case.upstream)]
    if _computes_on_one_rank_alone(source):
        ranks = [_run(case, call, source, [p[r] for p in inputs], [p[r] for p in upstream]) for r in range(RANKS)]
        outputs, gradients = ([list(parts) for parts in zip(*results)] for results in zip(*ranks))
    else:
        with LocalTensorMode(RANKS), spmd.set_current_mesh(mesh):
            results = _run(case, call, source, [*map(LocalTensor, inputs)], [*map(LocalTensor, upstream)])
        outputs, gradients = ([None if t is None else _by_rank(t) for t in tensors] for tensors in results)
    return [_parts(output) for output in outputs], [None if g is None or g[0] is None else _parts(g) for g in gradients]


def _run(
    case: Case, call: LocalCall, source: str, inputs: list[torch.Tensor], upstream: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    leaves = [tensor.requires_grad_(grad) for tensor, grad in zip(inputs, case.grads)]
    outputs = evaluate(source, {operand.name: leaf for operand, leaf in zip(call.inputs, leaves)})
    # an output that is an input itself hands its gradient straight through
    pairs = [(output, grad) for output, grad, has in zip(outputs, upstream, case.out_grads) if has]
    trained = [leaf for leaf, grad in zip(leaves, case.grads) if grad]
    if not pairs or not trained:
        return outputs, [None] * len(trained)
    return outputs, list(torch.autograd.grad([o for o, _ in pairs], trained, [g for _, g in pairs], allow_unused=True))


def check_numbers(mesh: DeviceMesh, case: Case, call: LocalCall, source: str) -> None:
    """Outputs and gradients of the shards, put together, are those of the whole operator."""
    outputs, gradients = run_on_shards(mesh, case, call, source)
    exact = all(tensor.dtype != torch.float32 for tensor in (*case.tensors, *case.outputs))
    for operand, parts, expected in zip(call.outputs, outputs, case.outputs):
        for rank, part in parts.items():
            shape = part_of(expected, operand.placement, MESH, divmod(rank, MESH.sizes[1])).shape
            assert part.shape == shape, f"{source}: local shape {part.shape}, expected {shape}"
        _assert_close(assemble(parts, operand.placement, exact=exact), expected, f"output of {source}", exact)
    trained = [pair for pair, grad in zip(zip(call.inputs, case.input_gradients), case.grads) if grad]
    for (operand, expected), gradient in zip(trained, gradients):
        parts = distribute(torch.zeros_like(expected), operand.placement) if gradient is None else gradient
        whole = assemble(parts, _dual(operand.placement), exact=exact)
        _assert_close(whole, expected, f"gradient of {operand} in {source}", exact)


def _by_rank(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor._local_tensors[rank] for rank in range(RANKS)]  # type: ignore[attr-defined]


def _parts(tensors: Sequence[torch.Tensor]) -> Parts:
    return {rank: tensor.detach() for rank, tensor in enumerate(tensors)}


def _dual(placement: Placement) -> Placement:
    return tuple(DUAL.get(spmd_type, spmd_type) for spmd_type in placement)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str, exact: bool) -> None:
    rtol, atol = (1e-9, 1e-10) if exact else (1e-4, 1e-4)
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


#: Calls that passed the checker, which looks at types, and at sizes only where they are one.
_PASSED: set[object] = set()


def check_types(mesh: DeviceMesh, case: Case, call: LocalCall, source: str) -> None:
    """The source has the plan's types under the checker, on meta tensors."""
    key = (source, *map(_kind, (*call.inputs, *call.outputs)))
    if key in _PASSED:
        return
    with spmd.set_current_mesh(mesh), spmd.checker.typecheck(local=True):
        operands = {}
        for operand, tensor in zip(call.inputs, case.tensors):
            meta = torch.empty(operand.shape, dtype=tensor.dtype, device="meta", requires_grad=operand.requires_grad)
            operands[operand.name] = spmd.assert_type(meta, _types(operand))
        outputs = evaluate(source, operands)
        for operand, output in zip(call.outputs, outputs):
            assert tuple(output.shape) == operand.shape, f"{source}: {tuple(output.shape)} != {operand.shape}"
            for axis, spmd_type in zip(MESH.names, operand.placement):
                actual = spmd.get_axis_local_type(output, axis)
                assert actual is LETTERS.get(spmd_type, spmd.V), f"{source}: {actual} on {axis}, expected {spmd_type}"
    _PASSED.add(key)


def _kind(operand: Operand) -> object:
    return operand.placement, operand.requires_grad, operand.dtype, tuple(size == 1 for size in operand.shape)


def _types(operand: Operand) -> dict[str, Any]:
    return {axis: LETTERS.get(spmd_type, spmd.V) for axis, spmd_type in zip(MESH.names, operand.placement)}


def prove(
    mesh: DeviceMesh, sample: Sample, *, rule: ShardingRule | None = None, pairs: Sequence[tuple[int, int]] = ()
) -> int:
    """Check every choice of a sample's rule on axis ``a`` (``b`` doing nothing), and ``pairs`` of choices on both.

    ``rule`` replaces the operator's own. Returns the number of combinations checked.
    """
    case = make_case(sample)
    if rule is None:
        rule = rule_for(case.node, case.values)
        assert rule is not None, f"no rule for {case.node}"
    choices = legal_choices(case, rule)
    combinations = [(choice, choices[0]) for choice in choices]
    combinations += [(choices[0], choices[-1])]
    combinations += [(choices[i % len(choices)], choices[j % len(choices)]) for i, j in pairs]
    count = 0
    for combination in dict.fromkeys(combinations):
        if not divides(case, rule, combination):
            continue
        call = local_call(case, rule, combination)
        source = expression(call)
        labels = [choice.label for choice in combination]
        try:
            check_types(mesh, case, call, source)
            check_numbers(mesh, case, call, source)
        except Exception as error:
            error.add_note(f"{sample.op} under {labels}: {source}\n{call}")
            raise
        count += 1
    return count
