"""One model type: built, trained a step in eager, captured, planned, verified, verified with a pipeline."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import torch

BATCH_SIZE = 4
STAGES = ("build", "eager", "capture", "plan", "verify", "pipeline")
MESH, PIPELINE = "dp=2,tp=2", "pp=2,dp=2"

Row = dict[str, Any]


def run_type(model_type: str, class_name: str, last_stage: str) -> Row:
    """The row of one model type: the last stage that it passed, and the reason of the first that it did not pass."""
    stages = STAGES[: STAGES.index(last_stage) + 1]
    verifying_plans = last_stage in ("verify", "pipeline")
    return run_stages(model_type, class_name, [stage for stage in stages if stage != "plan" or not verifying_plans])


def run_stages(model_type: str, class_name: str, stages: Sequence[str]) -> Row:
    """The row of these stages, the first two among them."""
    row: Row = {"type": model_type, "class": class_name, "passed": None, "seconds": {}}
    subject: Any = None
    for stage in stages:
        start = time.process_time()
        try:
            subject = _RUN[stage](row, subject)
        except Exception as error:  # models raise what they like
            row["failed"], row["reason"] = stage, reason_of(error)
            break
        finally:
            row["seconds"][stage] = round(time.process_time() - start, 2)
        row["passed"] = stage
    return row


def reason_of(error: BaseException) -> str:
    """One line about an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if "validation error" in text.lower():
        text = lines[-1]
    text = re.sub(r"\S*/site-packages/", "", " ".join(text.split()))
    return f"{type(error).__name__}: {text[:400]}"


def _build(row: Row, _: Any) -> Any:
    import transformers

    from benchmarks.coverage.tiny_configs import tiny_config

    config = tiny_config(row["type"])
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if hasattr(part, "use_cache"):
            part.use_cache = False  # of keys and values: for generating
    torch.manual_seed(0)
    model = getattr(transformers, row["class"])._from_config(config).train()
    for module in model.modules():
        if isinstance(module, (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.AlphaDropout)):
            module.p = 0.0
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return model


def _eager(row: Row, model: Any) -> Any:
    """Loss and gradients with the first candidate of inputs that gives finite ones."""
    from benchmarks.coverage.tiny_inputs import TinyInputs

    inputs = TinyInputs(model, row["type"], BATCH_SIZE)
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
                row["inputs"] = {
                    name: list(value.shape) if isinstance(value, torch.Tensor) else str(type(value).__name__)
                    for name, value in batch.items()
                }
                return model, batch
        if not learned:
            break
    assert first is not None
    raise first


def _train_once(model: Any, batch: dict[str, Any]) -> None:
    model.zero_grad()
    output = model(**batch)
    loss = output["loss"] if "loss" in output else output[0]
    if loss is None or (loss.ndim > 0 and loss.numel() > 1):
        raise ValueError("the model computes no loss from these inputs")
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        raise ValueError("no parameter has a gradient")
    if not (loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)):
        raise ValueError("the loss or a gradient is not finite")
    model.zero_grad()


def _capture(row: Row, subject: Any) -> Any:
    from passes.capture import capture

    model, batch = subject
    graph = capture(model, kwargs=batch)
    row["nodes"] = len(graph.nodes)
    return subject


def _plan(row: Row, subject: Any) -> Any:
    import planner
    from planner.verification.verify_model import slow_devices

    model, batch = subject
    _note_operators(row, planner.plan(model, slow_devices(4), mesh=MESH, example_inputs=batch))
    return subject


def _verify(row: Row, subject: Any) -> Any:
    return _verified(row, subject, MESH)


def _pipeline(row: Row, subject: Any) -> Any:
    return _verified(row, subject, PIPELINE)


def _verified(row: Row, subject: Any, mesh: str) -> Any:
    import planner

    model, batch = subject
    report = planner.verify(model, mesh, batch=batch)
    row.setdefault("tolerance", {})[mesh] = report.tolerance
    if mesh == MESH:
        _note_operators(row, report.plan)
    if not report.ok:
        raise AssertionError(f"on {mesh} it differs from one device: largest error {report.largest_error:.1e}")
    return subject


def _note_operators(row: Row, plan: Any) -> None:
    """The operators without a rule, and their share of the compute."""
    notes = [re.fullmatch(r"(\S+) has no sharding rule: .*\((\S+) s of compute a step\)", note) for note in plan.notes]
    seconds = {note[1]: float(note[2]) for note in notes if note is not None}
    compute = plan.costs.compute_forward + plan.costs.compute_backward
    row["without_rule"] = sorted(seconds)
    row["share_without_rule"] = round(sum(seconds.values()) / compute, 4) if compute else 0.0


_RUN = {"build": _build, "eager": _eager, "capture": _capture, "plan": _plan, "verify": _verify, "pipeline": _pipeline}
