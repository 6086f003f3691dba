"""Whether processes that have come to an elastic training are worth another plan: predicted, nothing is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cost_models import Cluster
from cost_models.text import counted
from passes.ir.errors import CaptureError
from passes.plan import Plan
from planner.planning import as_cluster, example_inputs_of
from planner.planning import plan as make_plan
from planner.targets import axis_sizes, plans_step, read_target
from planner.training_timeline import moving_bound
from planner.whole_step.candidates.demands import fixed_axes
from runtime.calls.skeleton import skeleton
from runtime.execution.mixed_precision import compute_dtype, computing_in
from runtime.migration.move_price import ReplanDecision, ReplanPrice, axes_of, step_seconds
from runtime.module.meeting import Facts


class GainPricing:
    """Prices plans of ``model``, compiled with ``options``, for more processes than there are.

    Raises:
        CaptureError: for a model that cannot be planned for.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        self._model = skeleton(model)
        self._options = {name: value for name, value in options.items() if name != "dynamic"}  # of no plan

    def plan_for(self, target: Any, cluster: Cluster, facts: Facts) -> Plan:
        """The plan that ``planner.compile`` would make for ``target`` on the devices of ``cluster``.

        Args:
            facts: what is trained, and in which modes modules are, by now.

        Raises:
            ValueError: if there is none.
        """
        target, options = read_target(target), dict(self._options)
        if isinstance(target, Plan):
            return target
        inputs, seq_len = options.pop("example_inputs", None), options.pop("seq_len", None)
        precision, hardware = options.pop("precision", None), options.pop("cluster", None)
        batch_size, fix = options.pop("batch_size", None), options.pop("fix", None)
        model = self._model_as(facts)
        if inputs is None:
            inputs = example_inputs_of(model, batch_size=batch_size, seq_len=seq_len)
        is_step = precision is not None or plans_step(target, {**options, "fix": fix})
        if precision is not None:
            model = computing_in(model, compute_dtype(precision))
        options = {name: value for name, value in options.items() if value is not None}
        if isinstance(target, Cluster):
            options["fix"], cluster = dict(fix or {}), target
        elif is_step:
            options["fix"] = fixed_axes(axis_sizes(target), fix)
        else:
            options["mesh"] = axis_sizes(target)
        if hardware is not None:
            cluster = as_cluster(hardware, num_devices=cluster.num_devices)
        with torch.random.fork_rng(devices=[]):
            return make_plan(model, cluster, example_inputs=inputs, **options)

    def _model_as(self, facts: Facts) -> nn.Module:
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(facts.trains.get(name, parameter.requires_grad))
        for path, module in self._model.named_modules():
            module.training = facts.modes.get(path, module.training)
        return self._model


def decide(
    present: Plan, make: Callable[[], Plan], cluster: Cluster, *, remaining_steps: int, replan_seconds: float
) -> ReplanDecision:
    """To stay, or to go on under the plan that ``make`` gives, whose rows are taken in; of equals the first.

    The price of going on under it: the steps that are left, all of a rank's new shard over the slowest link of
    ``cluster`` (the most that a move takes), and ``replan_seconds`` for programs. Where no such plan is, to stay.

    Raises:
        CaptureError: for a model that can be planned for with its weights alone.
        ValueError: for a plan without a predicted step.
    """
    stay = ReplanPrice("stay", step_seconds(present), remaining_steps)
    try:
        plan = make()
    except CaptureError:
        raise
    except ValueError as error:
        words = f"{counted(cluster.num_devices, 'process')}"
        return ReplanDecision((stay, ReplanPrice.impossible(words, remaining_steps, str(error))))
    moving = moving_bound(present, plan, cluster)
    go = ReplanPrice(axes_of(plan), step_seconds(plan), remaining_steps, moving, replan_seconds)
    return ReplanDecision((stay, go))
