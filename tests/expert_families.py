"""Mixtures of experts as people write them: tiny models of transformers, and layers written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: Sizes that all models of transformers share.
SIZES: Mapping[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "num_experts_per_tok": 2, "max_position_embeddings": 32,
}  # fmt: skip
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
#: Model type of transformers → what it needs besides.
LANGUAGE_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 4},
    "DeepseekV3": {
        **_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0,
        "moe_intermediate_size": 12, "num_key_value_heads": 4, "n_shared_experts": 1,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 4},
}  # fmt: skip


def language_model(name: str, experts: str = "grouped_mm", **options: Any) -> nn.Module:
    """A model of transformers with its experts as ``grouped_mm``, ``batched_mm`` or ``eager``."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SIZES, **LANGUAGE_MODELS[name], **options})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation(experts)  # type: ignore[operator]
    return model


def in_loops(model: nn.Module) -> None:
    """Run the experts of a model of transformers one after the other, which is what defines them."""
    if hasattr(model, "set_experts_implementation") and getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")


class FeedForward(nn.Module):
    """One expert."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class GatedFeedForward(nn.Module):
    """One expert with a gate and without biases."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ExpertLoop(nn.Module):
    """A loop over modules: the rows of each expert are picked, computed and added up."""

    def __init__(self, size: int, inner: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(size, num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(size, inner) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        scores, chosen = torch.topk(self.gate(rows), self.k)
        return self.mixed(rows, F.softmax(scores, dim=-1), chosen).view_as(x)

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            if len(token) == 0:
                continue
            result.index_add_(0, token, scores[token, choice, None] * expert(rows[token]))
        return result


class SteadyLoop(ExpertLoop):
    """A loop over modules that calls those without rows, too: their gradients are zeros."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            result.index_add_(0, token, scores[token, choice, None] * expert(rows[token]))
        return result


class HitLoop(ExpertLoop):
    """A loop over the experts that have any tokens, which have gates and no biases (Mixtral)."""

    def __init__(self, size: int, inner: int, num_experts: int, k: int) -> None:
        super().__init__(size, inner, num_experts, k)
        self.experts = nn.ModuleList(GatedFeedForward(size, inner) for _ in range(num_experts))

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        masks = F.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for index in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
            choice, token = torch.where(masks[index].squeeze(0))
            picked = rows[None, token].reshape(-1, rows.shape[-1])
            result.index_add_(0, token, self.experts[index](picked) * scores[token, choice, None])  # type: ignore[index]
        return result


class AnyChoiceLoop(ExpertLoop):
    """A loop over experts whose masks say whether any choice of a token is the expert."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            is_chosen = chosen == index
            mask = is_chosen.any(dim=-1)
            if mask.sum() == 0:
                continue
            result[mask] += expert(rows[mask]) * (scores * is_chosen).sum(-1)[mask].unsqueeze(-1)
        return result


class CountingLoop(ExpertLoop):
    """A loop in which the number of an expert's rows is a value."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            result.index_add_(0, token, scores[token, choice, None] * expert(rows[token]) / len(token))
        return result


class SkippingLoop(ExpertLoop):
    """A loop that leaves out experts of a single row."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            if len(token) > 1:
                result.index_add_(0, token, scores[token, choice, None] * expert(rows[token]))
        return result


class SlotLoop(ExpertLoop):
    """A loop in which an expert's weights depend on how many experts before it have rows."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result, slot = torch.zeros_like(rows), 0
        for index in range(len(self.experts)):
            token, choice = torch.where(chosen == index)
            if len(token):
                result.index_add_(0, token, scores[token, choice, None] * self.experts[slot](rows[token]))
                slot += 1
        return result


class CapacityLoop(ExpertLoop):
    """A loop in which an expert takes no more rows than its capacity, which is above what the example has."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            if len(token) > 2_000_000:
                token, choice = token[:2_000_000], choice[:2_000_000]
            result.index_add_(0, token, scores[token, choice, None] * expert(rows[token]))
        return result


class DroppingHitLoop(ExpertLoop):
    """One expert a token; a sample's tokens beyond its experts' capacity are dropped; experts by name (Switch)."""

    capacity = 1

    def __init__(self, size: int, inner: int, num_experts: int, k: int) -> None:
        super().__init__(size, inner, num_experts, k)
        self.experts: Any = nn.ModuleDict({f"expert_{i}": FeedForward(size, inner) for i in range(num_experts)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).max(-1)
        one_hot = F.one_hot(chosen, len(self.experts))
        one_hot = one_hot * (one_hot.cumsum(-2) <= self.capacity)
        return self.dropping(x, scores, one_hot).view_as(x)

    def dropping(self, x: torch.Tensor, scores: torch.Tensor, one_hot: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        masks, scores = one_hot.view(-1, 1, len(self.experts)).permute(2, 1, 0), scores.view(-1, 1)
        result = torch.zeros_like(rows)
        for index in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
            choice, token = torch.where(masks[index].squeeze(0))
            result.index_add_(0, token, self.experts[f"expert_{index[0]}"](rows[token]) * scores[token, choice, None])
        return result


class DroppingColumnLoop(DroppingHitLoop):
    """The same by columns of one-hot rows; tokens that are dropped stay as they are."""

    def dropping(self, x: torch.Tensor, scores: torch.Tensor, one_hot: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        for index, expert in enumerate(self.experts.values()):
            mask = one_hot[:, :, index].bool()
            if mask.any():
                result[mask] = scores[mask][:, None] * expert(x[mask])
        return result


class PassingLoop(HitLoop):
    """A loop in which the last expert gives its rows back (LongCat)."""

    def __init__(self, size: int, inner: int, num_experts: int, k: int) -> None:
        super().__init__(size, inner, num_experts, k)
        self.experts[-1] = nn.Identity()


class SpareClassLoop(ExpertLoop):
    """A loop over the experts that were hit, by one-hot rows of one class more than there are experts (DBRX)."""

    def __init__(self, size: int, inner: int, num_experts: int, k: int) -> None:
        super().__init__(size, inner, num_experts, k)
        self.up = nn.Parameter(torch.randn(num_experts * inner, size) / size**0.5)
        self.down = nn.Parameter(torch.randn(num_experts * inner, size) / inner**0.5)
        self.experts = nn.ModuleList()
        self.num_experts = num_experts

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(rows)
        masks = F.one_hot(chosen, num_classes=self.num_experts + 1).permute(2, 1, 0)
        for index in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
            choice, token = torch.where(masks[index[0]])
            up, down = (weight.view(self.num_experts, -1, rows.shape[-1])[index[0]] for weight in (self.up, self.down))
            outputs = F.silu(rows[token].matmul(up.T)).matmul(down)
            result.index_add_(0, token, outputs * scores[token, choice, None])
        return result


class SplitLoop(ExpertLoop):
    """Rows are sorted by expert and cut by how many of them each expert has (JetMoe)."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().sort(0)[1]
        token = order.div(self.k, rounding_mode="trunc")
        sizes = self.counts(chosen).tolist()
        pieces = rows[token].split(sizes, dim=0)
        outputs = torch.cat([self.output(*entry) for entry in zip(self.experts, pieces, sizes)], dim=0)
        return torch.zeros_like(rows).index_add(0, token, outputs * scores.flatten()[order][:, None])

    def counts(self, chosen: torch.Tensor) -> torch.Tensor:
        marks = torch.zeros(len(chosen), len(self.experts)).scatter(1, chosen, 1)
        return marks.long().sum(0)

    def output(self, expert: nn.Module, piece: torch.Tensor, size: int) -> Any:
        return expert(piece)


class BinnedSplitLoop(SplitLoop):
    """The same, counted by ``bincount``."""

    def counts(self, chosen: torch.Tensor) -> torch.Tensor:
        return torch.bincount(chosen.flatten(), minlength=len(self.experts))


class SliceLoop(SplitLoop):
    """Each expert's rows are those behind the rows of the experts before it."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort()
        ordered, outputs, start = rows[order // self.k], [], 0
        for expert, size in zip(self.experts, self.counts(chosen).tolist()):
            outputs.append(expert(ordered[start : start + size]))
            start += size
        weighted = torch.cat(outputs) * scores.flatten()[order][:, None]
        return torch.zeros_like(rows).index_add(0, order // self.k, weighted)


class MaskedLoop(ExpertLoop):
    """A loop over modules: every expert sees every token, and weighs those that are not its own with zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.gate(x).softmax(-1)
        scores, chosen = probabilities.topk(self.k)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, scores)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


class OneHotDispatch(nn.Module):
    """Stacked weights; tokens reach every expert through a one-hot product."""

    def __init__(self, size: int, inner: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.k, self.num_experts = k, num_experts
        self.gate = nn.Linear(size, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, size, inner) / size**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, inner, size) / inner**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(self.k)
        one_hot = F.one_hot(chosen, self.num_experts).to(x.dtype)
        combine = torch.einsum("bsk,bske->bse", scores, one_hot)
        dispatched = torch.einsum("bse,bsh->ebsh", one_hot.sum(-2), x)
        inner = F.relu(torch.einsum("ebsh,ehf->ebsf", dispatched, self.up))
        outputs = torch.einsum("ebsf,efh->ebsh", inner, self.down)
        return torch.einsum("bse,ebsh->bsh", combine, outputs)


class CapacityDispatch(OneHotDispatch):
    """A place in each expert's buffer for each token, per sample; tokens beyond its capacity are dropped (GShard)."""

    capacity = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).max(-1)
        mask = F.one_hot(chosen, self.num_experts)
        place = (mask.cumsum(1) - 1) * mask
        mask = mask * (place < self.capacity)
        slots = F.one_hot((place * mask).sum(-1), self.capacity).to(x.dtype)
        dispatch = torch.einsum("bse,bsc->bsec", mask.to(x.dtype), slots)
        rows = torch.einsum("bsec,bsh->ebch", dispatch, x)
        inner = F.relu(torch.einsum("ebch,ehf->ebcf", rows, self.up))
        outputs = torch.einsum("ebcf,efh->ebch", inner, self.down)
        return torch.einsum("bsec,ebch->bsh", scores[..., None, None] * dispatch, outputs)


class DenseExperts(nn.Module):
    """All tokens through all experts, whose outputs are multiplied by scores of which most are zero.

    Args:
        offset: is added to every expert's output behind the scores, so that no expert may be left out.
    """

    offset = 0.0

    def __init__(self, size: int, inner: int, num_experts: int, k: int) -> None:
        super().__init__()
        self.k, self.num_experts = k, num_experts
        self.gate = nn.Linear(size, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, size, 2 * inner) / size**0.5)
        self.up_bias = nn.Parameter(torch.randn(num_experts, 2 * inner) / 10)
        self.down = nn.Parameter(torch.randn(num_experts, inner, size) / inner**0.5)
        self.down_bias = nn.Parameter(torch.randn(num_experts, size) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        logits = self.gate(rows)
        best, chosen = torch.topk(logits, self.k, dim=1)
        return self.mixed(rows, logits, best, chosen).view_as(x)

    def mixed(self, rows: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros_like(logits).scatter(1, chosen, best.softmax(-1))
        copies = rows.unsqueeze(0).expand(self.num_experts, *rows.shape)
        gate, up = (torch.bmm(copies, self.up) + self.up_bias[:, None]).chunk(2, -1)
        outputs = torch.bmm(F.silu(gate) * up, self.down) + self.down_bias[:, None, :]
        return (outputs * scores.T[..., None] + self.offset).sum(0)


class OffsetDenseExperts(DenseExperts):
    offset = 0.1


class ScoredInputs(DenseExperts):
    """Scores, zero or not, multiply what goes into the experts (Llama 4)."""

    def mixed(self, rows: torch.Tensor, logits: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(logits, float("-inf")).scatter(1, chosen, best).sigmoid()
        copies = rows.repeat(self.num_experts, 1) * scores.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(copies.view(self.num_experts, -1, rows.shape[-1]), self.up).chunk(2, -1)
        outputs = torch.bmm(up * F.silu(gate), self.down).view(-1, rows.shape[-1])
        return outputs.reshape(self.num_experts, -1, rows.shape[-1]).sum(dim=0)


class ByHand(nn.Module):
    """Tokens → embedding → residual layers → loss."""

    def __init__(
        self,
        *kinds: Callable[[int, int, int, int], nn.Module],
        size: int = 16,
        layers: int = 2,
        num_experts: int = 4,
    ) -> None:
        super().__init__()
        kinds = kinds if len(kinds) > 1 else kinds * layers
        self.embedding = nn.Embedding(32, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in kinds)
        self.layers = nn.ModuleList(layer(size, 12, num_experts, 2) for layer in kinds)
        self.head = nn.Linear(size, 32, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


FAMILIES: Mapping[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: language_model("Mixtral"),
    "mixtral eager": lambda: language_model("Mixtral", "eager"),
    "mixtral batched": lambda: language_model("Mixtral", "batched_mm"),
    "qwen3-moe": lambda: language_model("Qwen3Moe"),
    "deepseek-v3": lambda: language_model("DeepseekV3"),
    "deepseek-v3 eager": lambda: language_model("DeepseekV3", "eager"),
    "gpt-oss": lambda: language_model("GptOss"),
    "gpt-oss eager": lambda: language_model("GptOss", "eager"),
    "loop": lambda: ByHand(ExpertLoop),
    "steady loop": lambda: ByHand(SteadyLoop, ExpertLoop),
    "loops": lambda: ByHand(HitLoop, AnyChoiceLoop, num_experts=3),
    "dropping loops": lambda: ByHand(DroppingHitLoop, DroppingColumnLoop),
    "passing loop": lambda: ByHand(PassingLoop),
    "hit loop of a spare class": lambda: ByHand(SpareClassLoop),
    "splits": lambda: ByHand(SplitLoop, BinnedSplitLoop, SliceLoop),
    "masked loop": lambda: ByHand(MaskedLoop),
    "dense": lambda: ByHand(DenseExperts, ScoredInputs, OffsetDenseExperts),
    "one-hot": lambda: ByHand(OneHotDispatch),
    "capacity": lambda: ByHand(CapacityDispatch),
}


def family_model(name: str) -> nn.Module:
    """A model in float64 that trains, from a fixed seed."""
    torch.manual_seed(0)
    return FAMILIES[name]().double().train()


def family_batch(*, batch: int = 8, length: int = 6) -> dict[str, torch.Tensor]:
    """One global batch."""
    ids = torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}
