"""Tiny models train in another framework, with the exported settings, to the loss of the plan under our runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from planner.exports.transformers_table import TRANSFORMERS_TP
from tests.ranks import run_on_ranks
from tests.test_exports import WHOLE_HEADS, llama, odd_heads


def test_accelerate_and_transformers_train_to_our_loss_with_the_exported_settings(tmp_path: Path) -> None:
    cases = []
    odd = tmp_path / "odd-heads"
    for name, model, plan in (
        ("accelerate-fsdp2", "tiny-llama", llama("micro_batch=2", "accelerate-fsdp2")),
        ("transformers-tp", "tiny-llama", llama("tp=2", "transformers-tp")),
        ("transformers-tp of whole heads", str(odd), odd_heads(odd, **WHOLE_HEADS)),
    ):
        framework = name.partition(" ")[0]
        files = tmp_path / f"{name}.json", tmp_path / f"{name}.yaml"
        plan.save(files[0])
        exported = plan.export(framework, files[1])
        assert exported.inexpressible == ()
        if framework == "transformers-tp" and Version(transformers.__version__) < Version(TRANSFORMERS_TP.version):
            continue  # its configuration has not all of the fields yet
        case = {"name": name, "framework": framework, "model": model, "script": exported.script}
        cases.append({**case, "plan": str(files[0]), "file": str(files[1])})
    for name, losses in run_on_ranks("exported_layouts_worker", 2, cases).items():
        assert losses["theirs"] == pytest.approx(losses["ours"], rel=1e-6), name
        assert losses["ours"][0] != losses["ours"][-1]
