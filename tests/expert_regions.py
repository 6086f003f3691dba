"""Mixtures that no operator of their own stands for, each layer in its author's style; and a layer that is none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.expert_families import ExpertLoop, OneHotDispatch


class ScoredFirst(OneHotDispatch):
    """Rows sorted by expert, times their scores, gate and up of stacked weights, added to zeros by scatter."""

    def __init__(self, size: int, inner: int, num_experts: int, k: int) -> None:
        super().__init__(size, inner, num_experts, k)
        self.beside = nn.Parameter(torch.randn(num_experts, inner, size) / size**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scores, chosen = torch.sigmoid(self.gate(rows)).topk(self.k)
        order = torch.argsort(chosen.flatten(), stable=True)
        token = (order // self.k).reshape(-1, 1).expand(-1, x.shape[-1])
        sorted_rows = rows.gather(0, token) * scores.flatten()[order].reshape(-1, 1)
        counts = torch.histc(chosen.flatten().to(x.dtype), bins=self.num_experts, min=0, max=self.num_experts)
        outputs = []
        for expert, part in enumerate(sorted_rows.split(counts.long().tolist())):
            inside = F.silu(part @ self.up[expert]) * (part @ self.beside[expert].transpose(-2, -1))
            outputs.append(inside @ self.down[expert])
        return torch.zeros_like(rows).scatter_add(0, token, torch.cat(outputs)).view_as(x)


class ChoiceByChoice(OneHotDispatch):
    """Weights picked by each token's first choice, then by its second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).topk(self.k)
        result = torch.zeros_like(x)
        for place in range(self.k):
            expert = chosen[..., place]
            inner = torch.einsum("bsd,bsdh->bsh", x, self.up[expert]).tanh()
            outputs = torch.einsum("bsh,bshd->bsd", inner, self.down[expert])
            result = result + scores.softmax(-1)[..., place : place + 1] * outputs
        return result


class SoftStack(ExpertLoop):
    """All experts' outputs beside each other, of which each token takes a weighed mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return torch.einsum("...e,...ed->...d", self.gate(x).softmax(-1), outputs)


class SoftSum(ExpertLoop):
    """Experts' outputs added up one after the other, each times its gate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x.new_zeros(x.shape)
        for gate, expert in zip(self.gate(x).softmax(-1).unbind(-1), self.experts):
            result = result + gate.unsqueeze(-1) * expert(x)
        return result


class ComparingSum(ExpertLoop):
    """All experts compute all tokens; what was not chosen counts nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).topk(self.k)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = torch.where(chosen == index, scores.softmax(-1), 0.0).sum(-1, keepdim=True)
            result = result + share * expert(x)
        return result


class ExpertChoice(OneHotDispatch):
    """Each expert takes the tokens of the whole batch that suit it best (Zhou et al. 2022)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        best, token = self.gate(rows).softmax(-1).t().topk(len(rows) // self.num_experts)
        places = F.one_hot(token, len(rows)).to(x.dtype)
        inner = F.gelu(torch.bmm(torch.einsum("ecn,nd->ecd", places, rows), self.up))
        return torch.einsum("ecn,ec,ecd->nd", places, best, torch.bmm(inner, self.down)).view_as(x)


class ChosenOutputs(OneHotDispatch):
    """All experts compute all tokens; the outputs that were chosen are gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(self.k)
        outputs = torch.einsum("bsef,efh->bseh", F.relu(torch.einsum("bsh,ehf->bsef", x, self.up)), self.down)
        picked = outputs.gather(2, chosen.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
        return (picked * scores.unsqueeze(-1)).sum(2)


class BlockDiagonal(nn.Module):
    """A matrix for each group of channels: as many products as experts have, and no routing."""

    def __init__(self, size: int, inner: int, num_groups: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_groups, size // num_groups, size // num_groups))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (len(self.weight), -1))
        return torch.einsum("bsgi,gio->bsgo", groups, self.weight).flatten(-2)
