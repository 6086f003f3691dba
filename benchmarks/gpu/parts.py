"""What ``benchmarks.gpu`` runs: parts, each a list of items that fail, crash or hang by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cost_models.schedules import SCHEDULES

#: Operators whose bandwidth is measured, most wanted first.
FAST_OPERATORS = (
    "rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu", "bias_gelu", "rotary_pair", "cross_entropy",
)  # fmt: skip
OPERATORS = (
    *FAST_OPERATORS, "add_layer_norm", "rotary", "rotary_interleaved", "linear_cross_entropy", "embedding",
)  # fmt: skip
CONTESTANTS = (
    "Meshwright", "Hugging Face eager", "FSDP2 eager", "Meshwright compiled", "Hugging Face compiled", "FSDP2 compiled",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The machine: ``tiny`` is the rehearsal, on a processor, with sizes that mean nothing."""

    num_gpus: int
    tiny: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return max(1, self.num_gpus)


@dataclass(frozen=True)
class Item:
    """One thing that is measured.

    Attributes:
        function: ``"module:name"`` of a function of the setting and ``arguments`` that yields rows.
        seconds: after so long it is taken to hang.
    """

    name: str
    function: str
    seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Items that run one after the other in one group of ``ranks`` processes; a new group goes on after a crash.

    Attributes:
        seconds: that the part has; what is not begun by then is left out.
        needs: GPUs without which the part is left out.
        fresh: every item has processes of its own, whose memory nobody else has used.
    """

    name: str
    title: str
    seconds: float
    items: tuple[Item, ...]
    ranks: int = 1
    needs: int = 1
    fresh: bool = False


@dataclass(frozen=True)
class ModelSize:
    """A model of the library with so many layers, and each rank's samples of a step (``length`` tokens of them)."""

    config: str
    batch: int
    length: int | None
    changes: dict[str, Any] = field(default_factory=dict)


_LAST = "num_hidden_layers"
#: Plans that fill a GPU: config, changes, dtype, length, what blocks keep (``benchmarks.gpu.memory.FullCase``).
FULL_PLANS: dict[str, tuple[Any, ...]] = {
    "Llama 8B, nothing": ("llama-3-8b", {_LAST: 4}, "bfloat16", 4096, "none"),
    "Llama 8B, selective": ("llama-3-8b", {_LAST: 6}, "bfloat16", 4096, "selective"),
    "Llama 8B, full": ("llama-3-8b", {_LAST: 8}, "bfloat16", 8192, "full"),
    "Llama 8B, 4 micro-batches": ("llama-3-8b", {_LAST: 4}, "bfloat16", 4096, "selective", 4),
    "Llama 8B, chunked loss": ("llama-3-8b", {_LAST: 6}, "bfloat16", 2048, "chunked_loss"),
    "Llama 8B, on the host": ("llama-3-8b", {_LAST: 8}, "bfloat16", 4096, "offload"),
    "Llama 8B, float32": ("llama-3-8b", {_LAST: 4}, "float32", 1024, "none"),
    "Llama 70B, nothing": ("llama-3-70b", {_LAST: 2}, "bfloat16", 2048, "none"),
    "Llama 70B, full": ("llama-3-70b", {_LAST: 2}, "bfloat16", 2048, "full"),
    "GPT-2, nothing": ("gpt2", {}, "bfloat16", 1024, "none"),
    "GPT-2, selective": ("gpt2", {}, "bfloat16", 1024, "selective"),
    "GPT-2 XL, full": ("gpt2-xl", {}, "bfloat16", 1024, "full"),
    "GPT-2 medium, float32": ("gpt2-medium", {}, "float32", 512, "none"),
    "BERT large, nothing": ("bert-large", {}, "bfloat16", 512, "none"),
    "BERT large, full": ("bert-large", {}, "bfloat16", 512, "full"),
    "T5, nothing": ("t5-base", {}, "bfloat16", 512, "none"),
    "T5, selective": ("t5-base", {}, "bfloat16", 512, "selective"),
    "ViT large, nothing": ("vit-large", {}, "bfloat16", None, "none"),
    "ViT large, full": ("vit-large", {}, "bfloat16", None, "full"),
    "Mixtral, nothing": ("mixtral-8x7b", {_LAST: 2}, "bfloat16", 2048, "none"),
    "Mixtral, full": ("mixtral-8x7b", {_LAST: 2}, "bfloat16", 2048, "full"),
    "Qwen 7B, nothing": ("qwen2.5-7b", {_LAST: 6}, "bfloat16", 2048, "none"),
}
#: Of each kind one, for a rehearsal.
REHEARSED_MODELS = frozenset({"Llama", "T5", "Mixtral"})
REHEARSED_PLANS = frozenset(
    {"Llama 8B, 4 micro-batches", "Llama 8B, chunked loss", "Llama 8B, on the host", "Llama 8B, float32",
     "GPT-2, selective", "GPT-2 XL, full", "BERT large, nothing", "T5, nothing", "ViT large, full", "Mixtral, nothing"}
)  # fmt: skip
#: As wide as the models are, but of few layers: compiling a whole one takes minutes.
MODELS = {
    "Llama": ModelSize("llama-3-8b", 1, 4096, changes={_LAST: 4}),
    "GPT-2": ModelSize("gpt2", 8, 1024, changes={"n_layer": 6}),
    "BERT": ModelSize("bert-large", 16, 512, changes={_LAST: 6}),
    "T5": ModelSize("t5-base", 16, 512, changes={"num_layers": 4, "num_decoder_layers": 4}),
    "ViT": ModelSize("vit-large", 32, None, changes={_LAST: 6}),
    "Mixtral": ModelSize("mixtral-8x7b", 1, 2048, changes={_LAST: 1}),
}
_MIXTRAL = {
    "hidden_size": 32, "intermediate_size": 32, _LAST: 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_local_experts": 2, "vocab_size": 64,
}  # fmt: skip
TINY_MODELS = {
    "Llama": ModelSize("tiny-llama", 2, 8, changes={_LAST: 1}),
    "GPT-2": ModelSize("tiny-gpt2", 2, 8),
    "BERT": ModelSize("tiny-bert", 2, 8),
    "T5": ModelSize("tiny-t5", 2, 8),
    "ViT": ModelSize("tiny-vit", 2, None),
    "Mixtral": ModelSize("mixtral-8x7b", 2, 8, changes=_MIXTRAL),
}


def plan(setting: Setting) -> list[Part]:
    """All parts, in the order in which they run; those that one GPU runs have less than 36 minutes together."""
    here = "benchmarks.gpu"
    numerics = (
        *(Item(name, f"{here}.operators:numerics", 60, {"operator": name}) for name in OPERATORS),
        Item("experts", f"{here}.others:expert_numerics", 60),
        Item("adamw", f"{here}.others:adamw_numerics", 60),
    )
    bandwidth = tuple(Item(name, f"{here}.operators:bandwidth", 90, {"operator": name}) for name in FAST_OPERATORS)
    models = tuple(
        Part(
            f"step {model}", f"Steps of {model}", 120,
            tuple(
                Item(name, f"{here}.steps:step", 60, {"model": model, "contestant": name}) for name in CONTESTANTS
            ),
            ranks=setting.ranks,
            fresh=True,
        )
        for model in MODELS
        if model in REHEARSED_MODELS or not setting.tiny
    )  # fmt: skip
    parity = (
        *(Item(name, f"{here}.parity:parity", 60, {"fix": fix}) for name, fix in _parity_cases().items()),
        Item("ep=2", f"{here}.parity:parity", 60, {"fix": {"ep": 2}, "model": "Mixtral"}),
        Item("generation, tp=2", f"{here}.generation:tokens", 60, {"mesh": "tp=2"}),
    )
    generation = (
        Item("tokens", f"{here}.generation:tokens", 60, {"mesh": "dp=1"}),
        Item("seconds", f"{here}.generation:seconds", 60),
    )
    training = tuple(
        Item(name, f"{here}.training:{function}", 60, arguments) for name, function, arguments in _training_cases()
    )
    full = tuple(
        Item(name, f"{here}.memory:memory", 90, {"case": case})
        for name, case in FULL_PLANS.items()
        if name in REHEARSED_PLANS or not setting.tiny
    )
    kinds = ("operator", "chain", "collective", "unit")
    host = tuple(Item(kind, f"{here}.operators:host_time", 98, {"kind": kind}) for kind in kinds)
    return [
        # The first part waits for the imports of a machine that has read no file yet.
        Part("machine", "Machine", 90, (Item("machine", f"{here}.operators:machine", 90),)),
        Part("numerics", "Operators against float64", 150, numerics),
        Part("training", "Training as scripts do, against torch", 240, training),
        Part("products", "Products with odd rows", 30, (Item("rows", f"{here}.products:rows", 30),)),
        Part("bandwidth", "Operators against copy bandwidth and torch.compile", 210, bandwidth),
        *models,
        Part("memory", "Plans that fill the GPU", 420, full, fresh=True),
        Part("parity", "Schedules and ZeRO on NCCL against one GPU", 200, parity, ranks=2, needs=2),
        Part("generation", "Generation", 60, generation),
        Part("resume", "Killed and resumed", 120, (Item("resume", f"{here}.resume:resume", 120),)),
        Part("host", "Host time", 98, host),
    ]


def _parity_cases() -> dict[str, dict[str, Any]]:
    """Decisions of plans on two ranks, by name."""
    cases: dict[str, dict[str, Any]] = {
        name: {"pp": 2, "num_microbatches": 4, "schedule": name, "chunks_per_rank": row.chunks_per_rank or 2}
        for name, row in SCHEDULES.items()
    }
    cases |= {f"dp=2, ZeRO {zero}": {"dp": 2, "zero": zero, "num_microbatches": 2} for zero in range(4)}
    return cases | {"tp=2": {"tp": 2}, "cp=2": {"cp": 2}}


def _training_cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Name, function and arguments of each item."""
    models = (
        "tagger", "convolutions", "recurrent layers", "many operators", "a forward that names the GPU",
    )  # fmt: skip
    policies = (
        "nothing kept back", "selective", "full, 2 micro-batches", "chunked loss",
        "activations on the host, 2 micro-batches",
    )  # fmt: skip
    return [
        *((name, "user_model", {"name": name}) for name in models),
        *((name, "family", {"name": name}) for name in TINY_MODELS),
        *((f"{name}, bfloat16", "family", {"name": name, "dtype": "bfloat16"}) for name in ("Llama", "GPT-2", "T5")),
        *((f"Llama, {plan}", "planned", {"name": "Llama", "plan": plan}) for plan in policies),
        *((f"GPT-2, {plan}", "planned", {"name": "GPT-2", "plan": plan}) for plan in policies[1:3]),
        ("optimizer on the host", "offloaded_optimizer", {}),
        *(
            (f"{name}, compiled", "planned", {"name": name, "plan": "nothing kept back", "compiled": True})
            for name in ("Llama", "GPT-2")
        ),
        *((f"autocast to {dtype}", "autocast", {"dtype": dtype}) for dtype in ("bfloat16", "float16")),
        ("random numbers", "draws", {}),
        *((f"verify, {mesh}", "verified", {"mesh": mesh}) for mesh in ("dp=2,tp=2", "pp=2,dp=2")),
    ]


def rehearsal(parts: list[Part]) -> list[Part]:
    """Some items of every part, as a processor can run them in seconds."""
    chosen = {
        "numerics": ("rms_norm", "experts", "adamw"), "training": ("tagger", "random numbers"), "memory": (),
        "bandwidth": ("swiglu",), "parity": ("ep=2",),
        "step Llama": CONTESTANTS[:3], "host": ("chain",), "generation": ("tokens",),
    }  # fmt: skip
    outcomes = []
    for part in parts:
        names = chosen.get(part.name, CONTESTANTS[:0] if part.name.startswith("step ") else None)
        items = tuple(item for item in part.items if names is None or item.name in names)
        if items:
            ranks = 2 if part.name == "parity" else 1
            outcomes.append(Part(part.name, part.title, 600, tuple(map(_patient, items)), ranks, 0, part.fresh))
    return outcomes


def _patient(item: Item) -> Item:
    return Item(item.name, item.function, 600, item.arguments)
