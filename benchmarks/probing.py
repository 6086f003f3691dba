"""``python -m benchmarks.probing [NAME…]``: every operator of the tables is run for its rule as if it had none.

For random calls of each operator the rule that the probe finds is proved as the tables' rules are (values and gradients
of the emitted call under every choice, by ``tests.rules_harness``), and compared with the table's: what the table cuts
and the probe does not. Exit code 1 if a rule that was found is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import rules_samples_layers  # noqa: F401  (registers its samplers)
import rules_samples_matrices  # noqa: F401  (registers its samplers)
import rules_samples_parts  # noqa: F401  (registers its samplers)
import rules_samples_signals  # noqa: F401  (registers its samplers)
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rules_harness import Case, Sample, fake_mesh, make_case, prove
from rules_samples import SAMPLERS, Draw

from passes.rules import rule_for
from passes.rules.probing.probed_rules import is_worth_probing, probe
from passes.rules.rule import ShardingRule, axis_choices

EXAMPLES = 2


def drawn(op: str) -> list[Sample]:
    """Random calls of an operator."""
    samples: list[Sample] = []

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(data=st.data())
    def collect(data: Any) -> None:
        samples.append(Sample(op, *SAMPLERS[op](Draw(data))))

    collect()
    return samples


def cuts(case: Case, rule: ShardingRule | None) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    """What the cuts of a rule make of inputs and outputs."""
    if rule is None:
        return set()
    choices = axis_choices(rule, input_grads=case.grads, output_grads=case.out_grads)
    return {
        (choice.inputs, choice.outputs)
        for choice in choices
        if choice.factor is not None and not choice.reductions and rule.sizes[choice.factor] > 1
    }


def rows(names: list[str]) -> Iterator[tuple[str, str, float]]:
    """Operator, verdict and processor seconds of each random call."""
    with fake_mesh() as mesh:
        for op in sorted(name for name in SAMPLERS if not names or any(text in name for text in names)):
            for sample in drawn(op):
                torch.manual_seed(0)
                case = make_case(sample)
                if op.startswith("meshwright") or not is_worth_probing(case.node, case.values):
                    continue
                begin = time.process_time()
                rule = probe(case.node, case.values)
                seconds = time.process_time() - begin
                verdict = "nothing found" if rule is None else "proved"
                try:
                    if rule is not None:
                        prove(mesh, sample, rule=rule)
                except Exception as error:
                    verdict = f"WRONG: {str(error)[:200]!r}"
                missed = cuts(case, rule_for(case.node, case.values)) - cuts(case, rule)
                yield op, verdict + (f", not found: {sorted(missed)}" if missed else ""), seconds


def main() -> int:
    wrong = 0
    for op, verdict, seconds in rows(sys.argv[1:]):
        wrong += verdict.startswith("WRONG")
        print(f"{op:45} {seconds:6.2f} s  {verdict}", flush=True)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
