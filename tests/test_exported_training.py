"""Tiny models train in another framework, with the exported settings, to the loss of the plan under our runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from planner.exports.transformers_table import TRANSFORMERS_TP
from tests.ranks import run_on_ranks
from tests.test_exports import llama


def test_accelerate_and_transformers_train_to_our_loss_with_the_exported_settings(tmp_path: Path) -> None:
    cases = []
    for framework, fix in (("accelerate-fsdp2", "micro_batch=2"), ("transformers-tp", "tp=2")):
        plan = llama(fix, framework)
        files = tmp_path / f"{framework}.json", tmp_path / f"{framework}.yaml"
        plan.save(files[0])
        exported = plan.export(framework, files[1])
        assert exported.inexpressible == ()
        if framework == "transformers-tp" and Version(transformers.__version__) < Version(TRANSFORMERS_TP.version):
            continue  # its configuration has not all of the fields yet
        case = {"framework": framework, "model": "tiny-llama", "script": exported.script}
        cases.append({**case, "plan": str(files[0]), "file": str(files[1])})
    for framework, losses in run_on_ranks("exported_layouts_worker", 2, cases).items():
        assert losses["theirs"] == pytest.approx(losses["ours"], rel=1e-6), framework
        assert losses["ours"][0] != losses["ours"][-1]
