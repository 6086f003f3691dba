"""The sharded model: an ``nn.Module`` whose parameters are this rank's shards, called like the original."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cost_models.short_text import fold
from cost_models.text import counted
from passes.emit import Program
from passes.plan import Plan
from passes.torch_compat.module_tables import buffers_of, has_hooks, share_content
from runtime.agreement.call_agreement import FORWARD, TRAIN_STEP
from runtime.calls.frozen_prefix import ARGUMENTS
from runtime.calls.modes import SubmoduleModes
from runtime.execution.engine import Engine
from runtime.execution.expert_load import ExpertLoad, RoutingCounts
from runtime.execution.measured_trace import measured
from runtime.mesh.layout import DATA, Layout
from runtime.module.accumulation import Accumulation
from runtime.module.copying import Copying
from runtime.module.first_calls import FirstCall, FirstCalls
from runtime.module.joined_calls import JoinedCalls
from runtime.module.original_surface import LikeOriginal, OriginalSurface
from runtime.module.prefix_calls import PrefixCalls
from runtime.module.pretrained_files import PretrainedFiles
from runtime.parameters import ParameterTree, ShardedParameter, local_of
from runtime.parameters.choices_by_place import ChoicesByPlace
from runtime.parameters.fixed_structure import FixedStructure, write_buffer
from runtime.parameters.shared_steps import step_together
from runtime.parameters.shown_modules import show_kinds
from runtime.parameters.unwrappable import Unwrappable
from runtime.state.owned import Owned
from runtime.zero.norm import clip_gradients, gradient_norm


class ParallelModule(
    PrefixCalls, Copying, PretrainedFiles, FirstCalls, JoinedCalls, OriginalSurface, Unwrappable, FixedStructure
):
    """A model that runs sharded over a mesh.

    ``parameters()`` are DTensors under the original names (tied weights are one parameter), each over this rank's
    shard, so that optimizers, clipping and checkpoints of PyTorch work on them as on FSDP2's. With a pipeline a rank
    has those of its stage. Call it like the original, on the global batch: every rank takes its part.

    What it does not have itself (``config``, methods that only read) is the original's.

    Args:
        engine: makes and runs the programs; it holds the parameters and buffers.
        first_call: makes the engine that the mesh is planned for, from this one and the first call; None if this is it.
    """

    def __init__(self, engine: Engine, first_call: FirstCall | None = None) -> None:
        super().__init__()
        self._accumulation = Accumulation()
        self._joined = {}
        self._when_planned = []
        self._counted_as_trained = ()
        self._first_call = first_call
        self._hold(engine)
        self.register_load_state_dict_post_hook(_weights_changed)

    def _hold(self, engine: Engine, shown: Mapping[str, ShardedParameter] | None = None) -> None:
        """Run ``engine``; ``shown`` are the parameters that users hold already, by name."""
        self._state = engine.state
        self._engine = engine
        self._let_join_calls_of(engine)
        # What users see is this module's own content.
        num_stages = engine.places.num_stages
        ranks = None if engine.places.stage is None or engine.all_ranks.size == 1 else engine.all_ranks
        step_together(self, ranks, of_stage=num_stages > 1)
        self._tree = ParameterTree(engine.state, stages=num_stages, ranks=ranks, shown=shown)
        self._choices = ChoicesByPlace(engine.ranks, engine.state.state_names) if num_stages > 1 else None
        share_content(self, self._tree.weights)
        self._modes = SubmoduleModes(self, self._tree.weights, engine.model)
        show_kinds(self._tree.weights, engine.model, engine.watch, engine.state.stages_of)

    def __repr__(self) -> str:
        """The plan and what this rank has of it; the tree of a submodule is that submodule's own text."""
        if self._engine.waits:
            return f"{type(self).__name__}(this rank has no part in the plan)"
        here = [local_of(parameter).numel() for parameter in self.parameters()]
        whole = sum(parameter.numel() for parameter in self.parameters())
        words = f"{counted(len(here), 'parameter')} on this rank, {sum(here):,} of their {whole:,} elements"
        plan = " ".join(repr(self.plan).split()) if self.is_planned else "planned at the first call"
        return fold(f"{type(self).__name__}({plan}; {words})")

    @LikeOriginal
    def forward(self, *args: Any, local_inputs: bool = False, **kwargs: Any) -> Any:
        """Run the model.

        With ``local_inputs`` every rank passes the samples of its own data-parallel group (of a mesh without an axis
        ``dp``: its part on all axes), else the global batch.

        Returns what the original returns; outputs that are sharded are gathered when they are looked at.

        Raises:
            ValueError: if the plan cannot divide the inputs, or the call does not fit the model.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # in the other nothing is traced, and weights outlive it
                return self.forward(*args, local_inputs=local_inputs, **kwargs)
        self._plan_for(FORWARD, args, kwargs, local_inputs=local_inputs)
        self._engine.calls.together(self._check)
        self._compare_choices()
        try:
            with self._tree.stages_as_planned():
                outputs = self._engine(args, kwargs, local_inputs=local_inputs, parameters=self._tree.trained)
            self._settle()
            return outputs
        finally:
            self._end_call()

    def profile(self, path: str | FilePath) -> contextlib.AbstractContextManager[None]:
        """Measure what runs inside of a ``with`` block on every rank, and write it as one trace of all on the first.

        The tracks are those of ``planner trace``, which shows the same step as simulated; Perfetto opens both.

        Example:
            >>> with parallel.profile("measured.json"):
            ...     parallel.train_step(**batch)

        Raises:
            ValueError: if the file cannot be written.
        """
        return measured(path, self._engine.places)

    def train_step(
        self, *args: Any, local_inputs: bool = False, weight: float | torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Forward and backward of one global batch; gradients are added to ``parameters()``' ``grad``, complete.

        Args:
            weight: a number by which this batch's gradients are multiplied before they are added (default 1, inside of
                ``accumulate(n)`` 1/n). A tensor of that name is an input of the model.

        Returns:
            the loss of this batch, not multiplied by ``weight``: a scalar without history, the same on every rank.

        Raises:
            ValueError: as ``forward``, if the model returns no loss, and for a weight that is not finite.
        """
        if isinstance(weight, torch.Tensor):
            kwargs["weight"], weight = weight, None
        self._plan_for(TRAIN_STEP, args, kwargs, local_inputs=local_inputs)

        def ready() -> float:
            self._refuse_hooks()
            self._check()
            return self._accumulation.weight_of_step(weight)

        scale = self._engine.calls.together(ready)
        self._compare_choices()
        try:
            with self._tree.stages_as_planned():
                loss = self._engine.train(args, kwargs, local_inputs=local_inputs, weight=scale)
            self._settle()
            return loss
        finally:
            self._end_call()

    def _check(self) -> None:
        """Take up what was set on submodules and parameters since the last call.

        Raises:
            ValueError: for what a plan cannot follow.
        """
        self._tree.check()
        watch, modes = self._engine.watch, self._modes.follow()
        watch.frozen = self._tree.frozen()
        if modes is not None:
            watch.other_modes = modes

    def _compare_choices(self) -> None:
        if self._choices is not None:
            self._choices.compare(self._tree.shown())

    def _end_call(self) -> None:
        self._tree.follow()
        if self.layout.copies is not None:
            self.layout.copies.settle()

    def _refuse_hooks(self) -> None:
        """Raise ValueError for hooks that ``train_step`` would not call."""
        if has_hooks(self):
            raise ValueError("train_step calls no hooks of the parallel module: remove them, or call the module itself")

    @contextlib.contextmanager
    def accumulate(self, num_steps: int) -> Iterator[None]:
        """A context around the ``num_steps`` ``train_step`` calls before one optimizer step: each weighs 1/num_steps.

        Gradients are then those of the mean of the calls' losses.

        Raises:
            ValueError: for less than one step, and at the end if another number of them was run.
        """
        with contextlib.ExitStack() as stack:
            self._engine.calls.together(lambda: stack.enter_context(self._accumulation.over(num_steps)))
            yield
            self._engine.calls.together(stack.close)

    @contextlib.contextmanager
    def expert_load(self) -> Iterator[ExpertLoad]:
        """A context in which tokens are counted by expert and layer; all ranks must enter it.

            with parallel.expert_load() as load:
                parallel.train_step(**batch)
            load.tokens["model.layers.0.mlp.experts"]  # int64 [experts]: of all ranks and micro-batches

        Outside of it nothing is counted, and nothing costs time.

        Raises:
            ValueError: on all ranks, at its end if no experts were run; for blocks that ``torch.compile`` compiles,
                which would have to be compiled again.
        """
        engine, counts, load = self._engine, RoutingCounts(), ExpertLoad()
        engine.calls.check("calls expert_load")
        if self.is_planned and self.plan.step.compiled:
            raise ValueError("blocks that are compiled do not tell where tokens go: plan without compiled=True")
        with counts.recording():
            yield load
        load.add_up(engine.ranks.gathered(counts.by_path()))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that the whole model's norm is at most ``max_norm``; all ranks must call it.

        Args:
            max_norm: at least zero; infinity only measures.
            norm_type: above zero; infinity for the largest element.
            error_if_nonfinite: refuse to clip by a norm that is infinite or not a number.

        Returns:
            the norm before, a float64 scalar, the same on every rank.

        Raises:
            ValueError: on all ranks, for a ``max_norm`` below zero or not a number, a ``norm_type`` that is not above
                zero, and with ``error_if_nonfinite``.
        """
        calls = self._engine.calls
        calls.together(self._tree.take_gradients)
        arguments = f"{max_norm}, {norm_type}{', error_if_nonfinite' if error_if_nonfinite else ''}"
        calls.check(f"calls clip_grad_norm_({arguments})", may_run_ahead=True)
        parameters = [
            (owned.tensor, owned.counts)
            for owned in self.owned()
            if owned.trainable and isinstance(owned.tensor, nn.Parameter)
        ]
        norm = clip_gradients(
            parameters,
            self._engine.all_ranks,
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )
        calls.settle()
        return norm

    def gradient_norms(self, modules: Sequence[str]) -> list[float]:
        """The norm of the gradients of each of some modules, by path; all ranks must call it, and get the same.

        Raises:
            ValueError: for a module without parameters.
        """
        calls = self._engine.calls
        calls.together(self._tree.take_gradients)
        calls.check(f"calls gradient_norms({list(modules)})")
        norms = []
        for path in modules:
            if not any(name.startswith(f"{path}.") for name in self.state_names):
                raise ValueError(f"the model has no module {path!r} with parameters, whose gradients have a norm")
            own = [
                (owned.tensor, owned.counts)
                for owned in self.owned()
                if owned.trainable and isinstance(owned.tensor, nn.Parameter) and owned.name.startswith(f"{path}.")
            ]
            norms.append(float(gradient_norm(own, self._engine.all_ranks)))
        calls.settle()
        return norms

    @property
    def needed_inputs(self) -> frozenset[str] | None:
        """Names of the inputs that this rank's programs read; None if that is not known before the first call."""
        needed_inputs = self._engine.needed_inputs
        return None if needed_inputs is None else (needed_inputs | self._prefix_inputs) - ARGUMENTS

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; gradients that are dropped are not shown as DTensors first."""
        if set_to_none:
            self._tree.drop_gradients()
        else:
            super().zero_grad(set_to_none=False)

    def train(self, mode: bool = True) -> ParallelModule:
        super().train(mode)
        self._engine.model.train(mode)
        self._modes.note_set()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the original's root that its forward may read are set for the next call's program too."""
        engine = self.__dict__.get("_engine")
        if engine is not None and (name in buffers_of(self) or self._elsewhere(name) is not None):
            write_buffer(self, "", name, value)
        else:
            super().__setattr__(name, value)
        if engine is not None and name != "training" and name in vars(engine.model):
            engine.watch.set(("", name, ""), value)

    def _elsewhere(self, name: str) -> torch.Tensor | None:
        engine = self.__dict__.get("_engine")
        return None if engine is None or name in buffers_of(self) else buffers_of(engine.model).get(name)

    def _fixed_path(self) -> str | None:
        return None if self.__dict__.get("_engine") is None else ""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParallelModule:
        for dtype in {info.owner_dtype: None for info in self._state.everything()}:
            probe = torch.empty(0, dtype=dtype, device=self._engine.layout.device)
            changed = fn(probe)
            if changed.dtype != probe.dtype or changed.device.type != probe.device.type:
                raise ValueError(
                    "a parallel module keeps the dtypes and the device it was planned for: convert the model before "
                    "planner.compile, or choose the mesh's device_type"
                )
        self._state.apply(fn, recurse)
        self._engine.forget_constants()
        self._tree.update()
        return self

    @property
    def has_work(self) -> bool:
        """Whether this rank has a part in the plan; if not, it waits for ``replan`` (and every call is refused)."""
        return not self._engine.waits

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan yet; without example inputs it is made at the first call."""
        return self._engine.plan is not None

    @property
    def plan(self) -> Plan:
        """The plan it runs under.

        Raises:
            ValueError: before the first call, if it was compiled without example inputs.
        """
        if self._engine.waits:
            raise ValueError("this rank has no part in the plan (parallel.has_work is False): those at work have it")
        if self._engine.plan is None:
            raise ValueError("there is no plan yet: it is made at the first call, or from example_inputs in compile()")
        return self._engine.plan

    @property
    def program(self) -> Program:
        """The emitted program that ran last (before the first call: the one made by compile)."""
        if self._engine.latest is None:
            raise ValueError("there is no program yet: the first call makes it, or compile() from example_inputs")
        return self._engine.latest

    @property
    def source(self) -> str:
        """Python source of ``program``."""
        return self.program.source

    def save(self, path: str | FilePath) -> None:
        """Save the plan as ``path`` (JSON) and the emitted program beside it (``.py``)."""
        target = FilePath(path)
        self.plan.save(target)
        self.program.save(target.with_suffix(".py"))

    def weights_changed(self) -> None:
        """To be called after new values were written into what ``owned`` gives (optimizers need not).

        Buffers on meta that no state dict holds are computed as the model's own initialisation does.
        """
        self._state.initialise(self._engine.model, seed=0, outside_of_state=True)
        self._engine.forget_constants()
        self._tree.update()

    def initialise(self, *, seed: int = 0) -> None:
        """Fill parameters and buffers that are still on meta as the model's own initialisation does.

        Modules are initialised one at a time, each from a seed of its own, so the result does not depend on the
        mesh, and a rank never holds more than its shards and one module. A rank without work holds nothing.
        """
        if self._engine.waits:
            return
        self._state.initialise(self._engine.model, seed=seed)
        self._engine.forget_constants()
        self._tree.update()

    def owned(self) -> tuple[Owned, ...]:
        """What this rank holds of every parameter and buffer."""
        return self._state.owned()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names in the original's state dict, aliases included."""
        return tuple(self._state.state_names)

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks, by axis."""
        return self.layout.device_mesh

    @property
    def data_rank(self) -> int:
        """Which data-parallel group this rank belongs to: its samples are that part of a global batch."""
        self._refuse_without_mesh()
        names = self.layout.mesh.names
        return self.layout.coordinate[names.index(DATA)] if DATA in names else 0

    @property
    def num_data_ranks(self) -> int:
        """How many data-parallel groups there are."""
        self._refuse_without_mesh()
        mesh = self.layout.mesh
        return mesh.size(DATA) if DATA in mesh.names else 1

    def _refuse_without_mesh(self) -> None:
        if self._first_call is not None:
            raise ValueError("the mesh is planned at the first call: before it, nothing says who reads which samples")

    @property
    def layout(self) -> Layout:
        """Where this module's tensors live."""
        return self._engine.layout


def _weights_changed(module: nn.Module, _: Any) -> None:
    assert isinstance(module, ParallelModule)
    module.weights_changed()
