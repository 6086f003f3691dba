"""``planner plan`` on islands: synchronous or DiLoCo, on the right side of the bandwidth at which both take as long."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from cost_models import Cluster
from cost_models.island_cluster import IslandCluster
from planner.cli import main
from planner.island_planning import IslandPlans, largest_inner_steps, plan_islands, shares_of

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: A device for which computing is all that takes time.
ALONE = Cluster.uniform(1, flops=1e9, memory_bandwidth=1e9, memory_bytes=1e9)
CONFIG = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
PARAMETERS = sum(value.numel() for value in LlamaForCausalLM(CONFIG).parameters())
H = 100


def planned(bandwidth: float, **options: Any) -> IslandPlans:
    """Two islands of one device each."""
    cluster = IslandCluster("two", (ALONE, ALONE), 0.0, bandwidth)
    fix = {"recompute": "none", "zero": 0, "num_microbatches": 1}
    return plan_islands(
        CONFIG, cluster, global_batch=4, seq_len=16, dtype="float32", fix=fix, fuse=False,
        **(options or {"inner_steps": H}),
    )  # fmt: skip


def test_the_choice_changes_at_the_bandwidth_at_which_both_take_as_long() -> None:
    """Over a very slow link the synchronous step sends nothing: it takes as long at any bandwidth about there."""
    slow = planned(1.0)
    assert slow.exchange_seconds == pytest.approx(4 * PARAMETERS) and not slow.meets_rarely
    even = 4 * PARAMETERS / H / (slow.synchronous_seconds - slow.inner_seconds)
    below, above = planned(even * 0.999), planned(even * 1.001)
    assert below.synchronous_seconds == above.synchronous_seconds == slow.synchronous_seconds
    assert not below.meets_rarely and "chosen: synchronous" in below.summary()
    assert above.meets_rarely and f"chosen: DiLoCo with H = {H}" in above.summary()


def test_synchronous_steps_at_first_count_in_the_choice() -> None:
    """A quarter of the steps sends all gradients: the break-even is where a slower link could do without it."""
    slow = planned(1.0, inner_steps=H, synchronous_share=0.25, wire_format="bfloat16")
    assert slow.gradient_seconds == pytest.approx(4 * PARAMETERS)
    assert slow.exchange_seconds == pytest.approx(2 * PARAMETERS)  # gathered: of two islands, the differences once
    assert slow.seconds - slow.inner_seconds == pytest.approx((0.25 * 4 + 0.75 * 2 / H) * PARAMETERS)
    even = (0.25 * 4 + 0.75 * 4 / H) * PARAMETERS / (slow.synchronous_seconds - slow.inner_seconds)
    below, above = (planned(even * factor, inner_steps=H, synchronous_share=0.25) for factor in (0.999, 1.001))
    assert not below.meets_rarely and planned(even * 0.999).meets_rarely
    assert above.meets_rarely
    assert f"chosen: DiLoCo with H = {H}, the first 25% of the steps synchronous\n" in above.summary()
    with pytest.raises(ValueError, match="synchronous_share=1"):
        planned(1.0, synchronous_share=1)


def test_where_neither_way_is_possible_nothing_is_saved(tmp_path: Path) -> None:
    plans = dataclasses.replace(planned(1.0), synchronous=None, obstacle="unlike islands", inner_steps=1)
    assert "chosen: none within the loss budget" in plans.summary()
    with pytest.raises(ValueError, match=r"no plan is saved: H = 1 is a synchronous step.*unlike islands"):
        plans.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


def test_the_loss_budget_says_which_H() -> None:
    assert [largest_inner_steps(budget) for budget in (0, 0.0145, 0.029, 1)] == [1, 223, 1000, 1000]
    by_budget = planned(1.0, loss_budget=0.0145)
    assert by_budget.inner_steps == 223 and "H by a loss budget of 1.45%, as the DiLoCo paper" in by_budget.summary()
    assert "budget" not in planned(1.0).summary()
    with pytest.raises(ValueError, match="share of the perplexity"):
        largest_inner_steps(-0.1)


def test_islands_get_samples_by_their_arithmetic() -> None:
    assert shares_of(96, [1, 1, 1]) == [32, 32, 32]
    assert shares_of(64, [3, 1]) == [48, 16]
    assert shares_of(7, [5, 1]) == [6, 1]
    with pytest.raises(ValueError, match="less than one for each of 2 islands"):
        shares_of(1, [1, 1])


def test_a_file_of_islands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sites = IslandCluster.from_toml(Path(__file__).parent.parent / "examples" / "islands" / "three-sites.toml")
    assert [island.num_devices for island in sites.islands] == [32, 32, 16]
    assert sites.exchange_seconds(6e9) == pytest.approx(4 * 20e-3 + 4 / 3 * 6e9 / 1.25e9)
    with pytest.raises(ValueError, match="islands of the same size"):
        sites.joined()
    joined = IslandCluster("two", sites.islands[:2], sites.latency, sites.bandwidth).joined()
    assert joined.num_devices == 64 and joined.levels[-1].shared_by == 32
    command = ["plan", "tiny-llama", "--seq-len", "16", "--global-batch", "4"]
    assert main([*command, "--loss-budget", "0.01"]) == 2
    assert "--loss-budget is for islands" in capsys.readouterr().err
    file = tmp_path / "one.toml"
    file.write_text('name = "one"\nislands = [{cluster = "dgx-h100"}]\n[slow_link]\nlatency = 0.1\nbandwidth = 1e6\n')
    assert main([*command, "--cluster", str(file)]) == 2
    assert "at least two islands" in capsys.readouterr().err
    file.write_text(file.read_text().replace('"dgx-h100"', '"dgx-h100", count = 2'))
    assert main([*command, "--cluster", str(file), "--mesh", "dp=2"]) == 2
    assert "--mesh does not go with a cluster of islands" in capsys.readouterr().err
