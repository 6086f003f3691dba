"""Tables of ``passes.emit.roles``: which argument, operator or module gives a value which name."""

from __future__ import annotations

import re

#: Operator → argument → what its value is for.
ARGUMENTS: dict[str, dict[str, str]] = {
    "scaled_dot_product_attention": {"query": "q", "key": "k", "value": "v", "attn_mask": "mask"},
    "rotary": {"cos": "cos", "sin": "sin"},
    "rotary_pair": {"query": "q", "key": "k", "cos": "cos", "sin": "sin"},
    "swiglu": {"gate": "gate", "up": "up"},
    "geglu": {"gate": "gate", "up": "up"},
    "cross_entropy": {"logits": "logits", "target": "labels"},
    "linear_cross_entropy": {"target": "labels"},
    "expert_linear": {"expert_ids": "expert_ids"},
    "gated_delta_rule": {"query": "q", "key": "k", "value": "v", "log_decay": "log_decay", "beta": "beta"},
    "softmax": {"self": "scores"},
    "_softmax": {"self": "scores"},
    "cos": {"self": "angles"},
    "sin": {"self": "angles"},
    "embedding": {"indices": "indices"},
    "where": {"condition": "mask"},
    "masked_fill": {"mask": "mask"},
}
#: Roles that also name what is computed with weights, whatever its module is called.
STRONG = frozenset({"q", "k", "v", "qk", "kv", "qv", "qkv", "gate", "up", "gate_up", "up_gate", "logits", "angles"})

#: Operators whose result is the same tensor in another shape, type or place, and has its name.
VIEWS = frozenset(
    (
        "view", "_unsafe_view", "reshape", "view_as", "reshape_as", "flatten", "ravel", "unflatten",
        "squeeze", "unsqueeze", "transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "adjoint",
        "permute", "movedim", "expand", "expand_as", "broadcast_to", "contiguous", "clone", "alias", "detach",
        "to", "_to_copy", "type_as", "dropout", "lift_fresh_copy", "positive", "pad", "constant_pad_nd",
        "repeat_interleave", "repeat", "slice", "narrow",
    )
)  # fmt: skip
#: Operators that take parts out of a tensor: a fused projection is named after all of them.
PARTS = frozenset({"split", "split_with_sizes", "chunk", "unbind", "select"})
#: Operator → arguments that are for the same as its result.
THROUGH: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(VIEWS, ("self", "input", "a")),
    "rotary": ("input",),
    "cat": ("tensors",),
}
#: Operators that scale or cap what they take, and the roles that go through them.
SCALES = frozenset({"mul", "div", "tanh"})
SCALED = frozenset({"q", "k", "scores", "logits"})
NORMS = frozenset({"rms_norm", "layer_norm"})
#: Operators that add to the residual stream, as their first result.
ADDS = frozenset({"add", "add_rms_norm", "add_layer_norm"})

#: Operator → names of its results; the last stands for those behind it.
RESULTS: dict[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": ("attention",),
    "rms_norm": ("h",),
    "layer_norm": ("h",),
    "group_norm": ("h",),
    "batch_norm": ("h",),
    "add_rms_norm": ("x", "h"),
    "add_layer_norm": ("x", "h"),
    "softmax": ("probabilities",),
    "_softmax": ("probabilities",),
    "log_softmax": ("log_probabilities",),
    "cross_entropy": ("losses",),
    "linear_cross_entropy": ("losses",),
    "rotary_pair": ("q", "k"),
    "gated_delta_rule": ("attention", "state"),
    "arange": ("positions",),
    "topk": ("top", "top_indices"),
    "sort": ("ordered", "order"),
    **dict.fromkeys(
        ("swiglu", "geglu", "bias_gelu", "gelu", "relu", "silu", "relu6", "elu", "leaky_relu", "mish", "tanh"),
        ("activation",),
    ),
}

#: (Operator, roles of its operands) → what its result is: relative positions, as T5 computes them, and their distances.
DERIVED: dict[tuple[str, tuple[str, ...]], str] = {
    ("ne", ("labels",)): "valid",
    ("sub", ("positions", "positions")): "relative_positions",
    ("rsub", ("positions", "positions")): "relative_positions",
    ("min", ("relative_positions", "zeros")): "relative_positions",
    ("minimum", ("relative_positions", "zeros")): "relative_positions",
    ("abs", ("relative_positions",)): "distances",
    ("neg", ("relative_positions",)): "distances",
}

#: Module name, and the name of what is computed with its weights.
LEAVES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), role)
    for pattern, role in (
        (r"q(_proj|uery|_lin)?|wq", "q"),
        (r"k(_proj|ey|_lin)?|wk", "k"),
        (r"v(_proj|alue|_lin)?|wv", "v"),
        (r"(c_attn|qkv(_proj)?|query_key_value|wqkv)", "qkv"),
        (r"gate(_proj)?", "gate"),
        (r"up(_proj)?", "up"),
        (r"lm_head|classifier|score", "logits"),
    )
)
#: Module name; the name of the result of its last weights; and, of the input of those, the roles that tell them.
MODULES: tuple[tuple[re.Pattern[str], str, frozenset[str]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), role, frozenset(takes))
    for pattern, role, takes in (
        (r"enc_?dec_?att\w*|encoder_att\w*|cross_?att\w*", "cross_attention", {"attention"}),
        (r"(self_?)?att(n|ention)?(_block)?|self_?att\w*", "attention", {"attention"}),
        (r"mlp|ffn?|feed_?forward|dense\w*dense", "feed_forward", {"activation"}),
    )
)
#: Names of modules that say nothing without the module that they are in.
GENERIC_MODULES = frozenset({"dense", "linear", "fc", "proj", "projection", "layer", "module", "conv", "norm"})

#: Operator → noun for what it gives.
NOUNS: dict[str, str] = {
    "add": "added", "sub": "difference", "rsub": "difference", "mul": "product", "div": "quotient", "neg": "negative",
    "abs": "magnitude", "pow": "power", "square": "square", "sqrt": "root", "rsqrt": "inverse_root",
    "exp": "exponential", "log": "logarithm", "sum": "total", "mean": "mean", "cumsum": "running_total",
    "matmul": "product", "bmm": "product", "mm": "product", "addmm": "product", "baddbmm": "product",
    "einsum": "product", "linear": "projection",
    "expert_linear": "projection", "conv1d": "features", "conv2d": "features", "conv3d": "features",
    "cat": "joined", "concat": "joined", "stack": "stacked", "eq": "is_equal", "ne": "is_other", "lt": "is_less",
    "le": "is_at_most", "gt": "is_greater", "ge": "is_at_least", "logical_and": "both", "logical_or": "either",
    "logical_not": "opposite", "where": "selected", "masked_fill": "masked", "sigmoid": "gating",
    "max": "largest", "min": "smallest", "amax": "largest", "amin": "smallest", "maximum": "larger",
    "minimum": "smaller", "clamp": "clamped", "gather": "gathered", "index_select": "rows", "index": "entries",
    "embedding": "embedding", "one_hot": "one_hot", "argmax": "largest_index", "argsort": "order",
    "slice_scatter": "shifted", "select_scatter": "shifted", "scatter": "scattered", "max_pool2d": "pooled",
    "avg_pool2d": "pooled", "adaptive_avg_pool2d": "pooled", "adaptive_avg_pool1d": "pooled", "mse_loss": "loss",
    "ones_like": "ones", "zeros_like": "zeros", "full_like": "filled", "full": "filled", "var": "variance",
    "std": "deviation", "bitwise_and": "both", "bitwise_or": "either", "rand_like": "noise", "randn_like": "noise",
    "rand": "noise", "randn": "noise", "bernoulli": "coin",
}  # fmt: skip
