"""What other frameworks have settings for, read off a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from passes.ir.types import shard_dim
from passes.plan import ConversionPlan, NodePlan, Plan
from passes.plan.step_plan import ChunkPlan, GroupPlan
from passes.plan.step_summary import tokens_per_sample
from passes.rules.rule import exchange_of

#: What a layer with a matrix does on the tensor axis. ``tokens``: the matrix is whole, the tokens are cut; ``hidden``:
#: an embedding whose hidden dim is cut; ``other``: an operator that has no name among these.
TensorRole = Literal["column", "row", "vocabulary", "hidden", "whole", "tokens", "other"]

#: Axes of plans that can be carried elsewhere.
AXES = ("pp", "dp", "ep", "cp", "tp")
#: Policies of layers that others may stand for: they keep no more bytes.
_FEWER_BYTES = {"full": frozenset(("full", "selective")), "regather": frozenset(("regather",))}
#: Bytes of what a loss over all samples is made of at most: its sum, or the count of its tokens.
_NUMBERS = 8
_EMBEDDINGS = frozenset(("aten.embedding.default", "meshwright.embedding.default"))
#: What a module does to a matrix of [inputs, outputs] before it multiplies by it.
_TRANSPOSES = frozenset(("aten.transpose.int", "aten.t.default"))
#: As graphs have them: torch's ``chunk`` and ``split`` become the first.
_SPLITS = frozenset(("aten.split_with_sizes.default", "aten.unbind.int"))


@dataclass(frozen=True)
class TensorLayer:
    """One module with a matrix and its role.

    Attributes:
        gathered: its cut output is gathered at once.
        in_pieces: the module around it splits tensors into pieces, as attention does with query, key and value in one.
        rows: of an embedding's matrix, of which rows are picked; else 0.
        is_transposed: its matrix is kept as [inputs, outputs], as transformers' ``Conv1D`` does.
        takes_whole: a row layer behind no column layer whose output stays cut: Python code hands it all features.
    """

    module: str
    role: TensorRole
    gathered: bool = False
    in_pieces: bool = False
    is_head: bool = False
    rows: int = 0
    is_transposed: bool = False
    takes_whole: bool = False

    @property
    def pattern(self) -> str:
        """The module's path with ``*`` for numbers."""
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", self.module)


@dataclass(frozen=True)
class PlanFacts:
    """A plan by the names of what frameworks can be told.

    Raises:
        ValueError: by ``of``, for axes that have no counterpart elsewhere.
    """

    plan: Plan

    @staticmethod
    def of(plan: Plan) -> PlanFacts:
        """The facts of ``plan``."""
        unknown = [axis for axis, size in plan.step.axes.items() if axis not in AXES and size > 1]
        if unknown:
            raise ValueError(
                f"mesh axis {unknown[0]!r} says nothing to other frameworks: plan on axes named {', '.join(AXES)}"
            )
        if not plan.training:
            raise ValueError("the plan is of inference, which has no step to export: plan a model with a loss")
        return PlanFacts(plan)

    def size(self, axis: str) -> int:
        """Ranks along a mesh axis."""
        return self.plan.step.axes.get(axis, 1)

    @property
    def order(self) -> tuple[str, ...]:
        """Axes of more than one rank, outermost first; ``ep`` lies inside of ``dp`` and counts as part of it."""
        return tuple(axis for axis, size in self.plan.step.axes.items() if size > 1 and axis != "ep")

    @property
    def samples(self) -> int:
        """Ranks with samples of their own: ``dp`` times ``ep``."""
        return self.plan.step.sample_groups

    @property
    def seq_len(self) -> int | None:
        """Tokens of a sample, None for models without."""
        return tokens_per_sample(self.plan)

    @cached_property
    def dtype(self) -> str:
        """The dtype that most parameters are computed in."""
        sizes: dict[str, int] = {}
        for state in self.plan.states.values():
            if state.trainable:
                sizes[state.dtype] = sizes.get(state.dtype, 0) + 1
        return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else "float32"

    @property
    def gradient_dtype(self) -> str:
        """The dtype in which gradients are summed."""
        if self.plan.step.gradient_dtype:
            return self.plan.step.gradient_dtype
        return "float32" if self.dtype in ("bfloat16", "float16") else self.dtype

    @property
    def schedule(self) -> str:
        """The pipeline's schedule; ``1f1b`` without a pipeline, where all are the same."""
        return self.plan.step.schedule if self.size("pp") > 1 else "1f1b"

    # Units and stages

    @property
    def groups(self) -> Iterator[GroupPlan]:
        """Groups of units, in model order."""
        return (group for chunk in self.plan.step.chunks for group in chunk.groups)

    def layers_of(self, group: GroupPlan) -> int:
        """Repeated layers in a group of units; 0 for units that do not repeat."""
        roots = self._layers_by_unit.get(group.unit)
        return 0 if roots is None else roots * group.count

    @cached_property
    def _layers_by_unit(self) -> dict[str, int]:
        """By the name of a repeated unit, how many layers one copy has (several where copies are planned in pairs)."""
        return {" ".join(copy): len(copy) for block in self.plan.blocks for copy in block.roots}

    def layers_in(self, chunk: ChunkPlan) -> int:
        """Repeated layers in a chunk."""
        return sum(self.layers_of(group) for group in chunk.groups)

    @property
    def num_layers(self) -> int:
        """Repeated layers in the model."""
        return sum(len(copy) for block in self.plan.blocks for copy in block.roots)

    @property
    def has_plain_ends(self) -> bool:
        """Whether what does not repeat lies in front of the first layer (first chunk) and behind the last (last)."""
        chunks = self.plan.step.chunks
        flat = [(index, self.layers_of(group) > 0) for index, chunk in enumerate(chunks) for group in chunk.groups]
        layers = [place for place, (_, is_layer) in enumerate(flat) if is_layer]
        if not layers:
            return len(chunks) == 1
        ends = [(place, index) for place, (index, is_layer) in enumerate(flat) if not is_layer]
        return all(
            (place < layers[0] and index == 0) or (place > layers[-1] and index == len(chunks) - 1)
            for place, index in ends
        )

    @property
    def layer_recompute(self) -> tuple[str, ...]:
        """Recompute policies of the repeated layers, in model order; of all units where nothing repeats."""
        policies = [group.recompute for group in self.groups if self.layers_of(group)]
        return tuple(dict.fromkeys(policies or self.plan.step.recompute or ("none",)))

    @property
    def exported_recompute(self) -> str:
        """The policy of all layers where frameworks have one for all, and neither knows what to keep of a layer.

        What layers of the plan recompute at all is recomputed whole: more would not fit.
        """
        policies = self.layer_recompute
        return next((policy for policy in ("full", "regather") if _FEWER_BYTES[policy] & set(policies)), policies[0])

    @property
    def end_recompute(self) -> tuple[str, ...]:
        """Recompute policies of what does not repeat, where layers do."""
        if not self.plan.blocks:
            return ()
        return tuple(dict.fromkeys(group.recompute for group in self.groups if not self.layers_of(group)))

    @property
    def zero(self) -> tuple[int, ...]:
        """ZeRO stages in use; (0,) where nothing is divided or there is nothing to divide among."""
        if self.samples * self.size("cp") == 1:
            return (0,)
        return self.plan.step.zero or (0,)

    @property
    def num_replicas(self) -> int:
        """Groups of data ranks that each hold all pieces of what ZeRO divides."""
        step = self.plan.step
        return step.data_ranks // step.zero_ranks if step.zero_ranks else 1

    @property
    def main_zero(self) -> int:
        """The ZeRO stage of most units."""
        counts: dict[int, int] = {}
        for group in self.groups:
            counts[group.zero] = counts.get(group.zero, 0) + group.count
        return max(counts, key=lambda stage: counts[stage]) if counts and self.zero != (0,) else 0

    # The tensor axis

    @cached_property
    def sequence_parallel(self) -> bool:
        """Whether tokens are cut on the tensor axis between the layers."""
        place = self._place("tp")
        if place is None or self.size("tp") == 1:
            return False
        return any(shard_dim(where[place]) is not None for block in self.plan.blocks for where in block.carried)

    @cached_property
    def gathers_in_blocks(self) -> bool:
        """Whether repeated blocks gather tokens on the tensor axis; products that exchange their rows keep none."""
        gathered = (step.value for step in self.activations_converted("tp", "all_gather"))
        return any(self._in_block(value.removeprefix("node:").split(":", 1)[0]) for value in gathered)

    @cached_property
    def overlaps_tensor(self) -> bool:
        """Whether layers exchange the rows that the tensor axis cuts beside their products."""
        place = self._place("tp")
        return place is not None and any(exchange_of(node.strategy[place]) for node in self.plan.nodes.values())

    @cached_property
    def tensor_layers(self) -> tuple[TensorLayer, ...]:
        """Modules with a matrix and what they do on the tensor axis; of repeated blocks, the first copy's."""
        place = self._place("tp")
        if place is None:
            return ()
        layers: list[TensorLayer] = []
        is_cut = False  # what the layers since the last row layer give
        transposed: set[str] = set()
        for key, node in self.plan.nodes.items():
            module = key.split(":", 1)[0]
            weight = self.plan.states.get(f"{module}.weight")
            if node.op in _TRANSPOSES:
                transposed.add(module)
            elif weight is not None and len(weight.shape) == 2:
                role = _role(node, self._cut_as_used(f"{module}.weight", place), place)
                is_head = role != "vocabulary" and not self._in_block(module) and node.op not in _EMBEDDINGS
                rows = weight.shape[0] if node.op in _EMBEDDINGS else 0
                layer = TensorLayer(
                    module,
                    role,
                    gathered=self._is_gathered(key),
                    in_pieces=module.rpartition(".")[0] in self._splitting_modules,
                    is_head=is_head,
                    rows=rows,
                    is_transposed=module in transposed,
                    takes_whole=role == "row" and not is_cut,
                )
                is_cut = role != "row" and (is_cut or (role == "column" and not layer.gathered))
                layers.append(layer)
        return tuple(layers)

    def activations_converted(self, axis: str, collective: str) -> tuple[ConversionPlan, ...]:
        """Conversions of activations on an axis whose forward collective is ``collective``."""
        return tuple(
            step
            for step in self.plan.conversions
            if step.axis == axis and step.forward == collective and not step.value.startswith("state:")
        )

    @cached_property
    def joined_samples(self) -> tuple[ConversionPlan, ...]:
        """Collectives of the forward pass that join activations of data ranks, but for a number or two of the loss."""
        return tuple(
            step
            for collective in ("all_gather", "all_reduce", "reduce_scatter")
            for step in self.activations_converted("dp", collective)
            if step.num_bytes > _NUMBERS
        )

    def is_batch_norm(self, step: ConversionPlan) -> bool:
        """Whether a conversion is of a statistic of batch norm."""
        module = step.value.removeprefix("node:").split(":", 1)[0]
        return f"{module}.running_mean" in self.plan.states

    def cut_states(self, axis: str) -> tuple[str, ...]:
        """Parameters that are cut on an axis while they are used."""
        place = self._place(axis)
        if place is None:
            return ()
        return tuple(
            name
            for name, state in self.plan.states.items()
            if state.trainable and shard_dim(state.placement[place]) is not None
        )

    def _cut_as_used(self, name: str, place: int) -> int | None:
        """The dim along which the tensor axis cuts a weight as operators use it; None if its parts are gathered."""
        cut = shard_dim(self.plan.states[name].placement[place])
        uses = (step for step in self.plan.conversions if step.axis == "tp" and step.value == f"state:{name}")
        return None if any(shard_dim(step.target[place]) is None for step in uses) else cut

    def _is_gathered(self, key: str) -> bool:
        return any(step.value == f"node:{key}#0" for step in self.activations_converted("tp", "all_gather"))

    @cached_property
    def _splitting_modules(self) -> frozenset[str]:
        """Modules that split a tensor into pieces."""
        return frozenset(key.split(":", 1)[0] for key, node in self.plan.nodes.items() if node.op in _SPLITS)

    def _in_block(self, module: str) -> bool:
        roots = {root for block in self.plan.blocks for copy in block.roots for root in copy}
        return any(module == root or module.startswith(f"{root}.") for root in roots)

    def _place(self, axis: str) -> int | None:
        names = self.plan.mesh.names
        return names.index(axis) if axis in names else None


def _role(node: NodePlan, cut: int | None, place: int) -> TensorRole:
    """The role of a layer whose weight is cut along dim ``cut`` of the tensor axis."""
    output = node.outputs[0][place]
    if node.op in _EMBEDDINGS:
        return "whole" if cut is None else ("vocabulary" if cut == 0 else "hidden")
    if cut is None:
        return "whole" if shard_dim(output) is None else "tokens"
    if str(output) == "P" or exchange_of(node.strategy[place]) == "scatter":
        return "row"
    return "column" if shard_dim(output) is not None or "cross_entropy" in node.op else "other"
