"""One model type: built, trained a step in eager, captured, planned, verified, verified with a pipeline."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.coverage.model_types import reads_labels
from benchmarks.coverage.rows import Outcome, outcomes_as_data

BATCH_SIZE = 4
MESH, PIPELINE = "dp=2,tp=2", "pp=2,dp=2"

Facts = dict[str, Any]

NO_LOSS = "the model takes labels, and its forward reads them nowhere"


def run_stages(model_type: str, class_name: str, stages: Sequence[str], *, commit: str) -> dict[str, Any]:
    """Outcomes of the stages, as data: build and eager, then each of ``stages``; a capture that fails ends them.

    A stage that fails is followed by a capture, which tells whether the fault lies there; then it is the capture's.
    """
    outcomes: dict[str, Outcome] = {}
    model = _attempt(outcomes, "build", commit, lambda facts: _build(model_type, class_name, facts))
    batch = model and _attempt(outcomes, "eager", commit, lambda facts: _eager(model_type, model, facts))
    if batch is None:
        return outcomes_as_data(outcomes)
    for stage in stages:
        run = _RUN[stage]
        _attempt(outcomes, stage, commit, lambda facts, run=run: run(model, batch, facts))  # type: ignore[misc]
        if not outcomes[stage].passed and "capture" not in outcomes:
            _attempt(outcomes, "capture", commit, lambda facts: _capture(model, batch, facts))
        if "capture" in outcomes and not outcomes["capture"].passed:
            outcomes = {name: outcome for name, outcome in outcomes.items() if name in ("build", "eager", "capture")}
            break
    return outcomes_as_data(outcomes)


def _attempt(outcomes: dict[str, Outcome], stage: str, commit: str, run: Callable[[Facts], Any]) -> Any:
    """What ``run`` returns, or None if it raises; the outcome is noted."""
    facts: Facts = {}
    start, reason, result = time.process_time(), "", None
    try:
        result = run(facts)
    except Exception as error:  # models raise what they like
        reason = reason_of(error)
    outcomes[stage] = Outcome(commit, reason, round(time.process_time() - start, 2), facts)
    return result


def reason_of(error: BaseException) -> str:
    """One line about an error."""
    lines = [line.strip() for line in re.sub(r"^cannot capture \w+: ", "", str(error)).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if "validation error" in text.lower():
        text = lines[-1]
    text = re.sub(r"\S*/site-packages/", "", " ".join(text.split()))
    return f"{type(error).__name__}: {text[:400]}"


def _build(model_type: str, class_name: str, facts: Facts) -> Any:
    import transformers

    from benchmarks.coverage.tiny_configs import tiny_config

    config = tiny_config(model_type)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if hasattr(part, "use_cache"):
            part.use_cache = False  # of keys and values: for generating
    torch.manual_seed(0)
    model = getattr(transformers, class_name)._from_config(config).train()
    for module in model.modules():
        if isinstance(module, (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.AlphaDropout)):
            module.p = 0.0
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return model


def _eager(model_type: str, model: Any, facts: Facts) -> Any:
    """The first candidate of inputs that gives a finite loss and finite gradients."""
    from benchmarks.coverage.tiny_inputs import TinyInputs

    inputs = TinyInputs(model, model_type, BATCH_SIZE)
    first: Exception | None = None
    for attempt in range(3):
        learned = False
        for batch in inputs.candidates():
            try:
                _train_once(model, batch)
            except Exception as error:  # models raise what they like
                first = first if attempt == 0 and first is not None else error
                if inputs.learns_from(error):
                    learned = True
                    break
            else:
                facts["inputs"] = {
                    name: list(value.shape) if isinstance(value, torch.Tensor) else str(type(value).__name__)
                    for name, value in batch.items()
                }
                return batch
        if not learned:
            break
    assert first is not None
    raise first


def _train_once(model: Any, batch: dict[str, Any]) -> None:
    model.zero_grad()
    output = model(**batch)
    loss = output["loss"] if "loss" in output else output[0]
    if loss is None or (loss.ndim > 0 and loss.numel() > 1):
        raise ValueError("the model computes no loss from these inputs" if reads_labels(type(model)) else NO_LOSS)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        raise ValueError("no parameter has a gradient")
    if not (loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)):
        raise ValueError("the loss or a gradient is not finite")
    model.zero_grad()


def _capture(model: Any, batch: Any, facts: Facts) -> None:
    from passes.capture import capture

    facts["nodes"] = len(capture(model, kwargs=batch).nodes)


def _plan(model: Any, batch: Any, facts: Facts) -> None:
    import planner
    from planner.verification.verify_model import slow_devices

    _note_operators(facts, planner.plan(model, slow_devices(4), mesh=MESH, example_inputs=batch))


def _verify(model: Any, batch: Any, facts: Facts, mesh: str = MESH) -> None:
    import planner

    report = planner.verify(model, mesh, batch=batch)
    facts["tolerance"], facts["largest_error"] = report.tolerance, float(f"{report.largest_error:.1e}")
    _note_operators(facts, report.plan)
    if not report.collectives_as_planned:
        line = next(line for line in report.table().splitlines() if line.startswith("collectives"))
        raise AssertionError(f"on {mesh} (largest error {report.largest_error:.1e}) {line}")
    if not report.ok:
        raise AssertionError(f"on {mesh} it differs from one device: largest error {report.largest_error:.1e}")


def _pipeline(model: Any, batch: Any, facts: Facts) -> None:
    _verify(model, batch, facts, PIPELINE)


def _note_operators(facts: Facts, plan: Any) -> None:
    """The operators without a rule, and their share of the compute."""
    notes = [re.fullmatch(r"(\S+) has no sharding rule: .*\((\S+) s of compute a step\)", note) for note in plan.notes]
    seconds = {note[1]: float(note[2]) for note in notes if note is not None}
    compute = plan.costs.compute_forward + plan.costs.compute_backward
    facts["share_without_rule"] = round(sum(seconds.values()) / compute, 4) if compute else 0.0
    if seconds:
        facts["without_rule"] = sorted(seconds)


_RUN = {"capture": _capture, "plan": _plan, "verify": _verify, "pipeline": _pipeline}
