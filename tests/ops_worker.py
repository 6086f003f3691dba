"""One rank of ``test_ops_vocabulary``: the operators of ``runtime.ops`` on real process groups against whole ones."""

from __future__ import annotations

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from runtime import ops
from tests.ranks import answer, task

VOCABULARY, HIDDEN = 8, 4


def difference(local: torch.Tensor | None, whole: torch.Tensor | None, dim: int | None) -> float:
    """Largest difference of this rank's part (along ``dim``; None: a copy) on any rank."""
    assert local is not None and whole is not None
    expected = whole if dim is None else whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    worst = (local - expected).abs().max().detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def losses() -> dict[str, float]:
    logits = (100.0 * torch.randn(3, 5, VOCABULARY, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, VOCABULARY, (3, 5))
    target[0, :2] = -100
    weight = torch.randn(3, 5, dtype=torch.float64)
    results = {}
    for smoothing in (0.0, 0.2):
        whole = F.cross_entropy(logits.mT, target, reduction="none", label_smoothing=smoothing)
        (expected,) = torch.autograd.grad((whole * weight).sum(), logits)
        local = logits.detach().chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous().requires_grad_()
        result = ops.cross_entropy(local, target, label_smoothing=smoothing, vocabulary=VOCABULARY, axes=("tp",))
        (result * weight).sum().backward()
        results[f"loss {smoothing}"] = difference(result, whole, None)
        results[f"loss gradient {smoothing}"] = difference(local.grad, expected, -1)
    return results


def linear_losses() -> dict[str, float]:
    """With the vocabulary cut; a rank's gradient of the hidden states is its part of a sum."""
    operands = {"hidden": (3, 5, HIDDEN), "weight": (VOCABULARY, HIDDEN), "bias": (VOCABULARY,)}
    hidden, table, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in operands.values())
    target = torch.randint(0, VOCABULARY, (3, 5))
    target[0, :2] = -100
    weight = torch.randn(3, 5, dtype=torch.float64)
    logits = F.linear(hidden, table, bias)
    whole = F.cross_entropy(logits.mT, target, reduction="none", label_smoothing=0.1)
    whole = whole + 0.01 * logits.logsumexp(-1).square() * (target != -100)
    expected = torch.autograd.grad((whole * weight).sum(), (hidden, table, bias))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    cut = [tensor.detach().chunk(ranks)[rank].contiguous().requires_grad_() for tensor in (table, bias)]
    local = hidden.detach().requires_grad_(), *cut
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "chunk_tokens": 4}
    result = ops.linear_cross_entropy(*local[:2], target, local[2], vocabulary=VOCABULARY, axes=("tp",), **options)
    results = torch.autograd.grad((result * weight).sum(), local)
    dist.all_reduce(results[0])
    parts = zip(operands, results, expected, (None, 0, 0))
    differences = {f"linear {name} gradient": difference(one, other, dim) for name, one, other, dim in parts}
    return {"linear loss": difference(result, whole, None), **differences}


def rows() -> dict[str, float]:
    table = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(0, VOCABULARY, (3, 5))
    weight = torch.randn(3, 5, HIDDEN, dtype=torch.float64)
    whole = F.embedding(indices, table, padding_idx=int(indices[0, 0]))
    (expected,) = torch.autograd.grad((whole * weight).sum(), table)
    local = table.detach().chunk(dist.get_world_size(), 0)[dist.get_rank()].contiguous().requires_grad_()
    part = ops.embedding(indices, local, vocabulary=VOCABULARY, padding_idx=int(indices[0, 0]), axes=("tp",))
    result = spmd.all_reduce(part, "tp", src=spmd.P, dst=spmd.I)
    (result * weight).sum().backward()
    return {"rows": difference(result, whole, None), "rows gradient": difference(local.grad, expected, 0)}


def masks() -> dict[str, float]:
    """Dropout: 0 where copies are masked alike, and shards as the whole."""
    x = torch.ones(1000)
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    torch.manual_seed(dist.get_rank())  # what else a rank draws makes no difference
    ops.seed(3)
    whole = ops.dropout(x, 0.5)
    shard = ops.dropout(part, 0.5, shards={"tp": 0})
    return {"copies": difference_of_ranks(whole), "shards": difference(shard, whole, 0)}


def difference_of_ranks(tensor: torch.Tensor) -> float:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return float(max((other - gathered[0]).abs().max() for other in gathered))


if __name__ == "__main__":
    task()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    with spmd.set_current_mesh(mesh):
        answer({**losses(), **linear_losses(), **rows(), **masks()})
