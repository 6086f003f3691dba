"""Operators that treat each sample apart are cut along the batch, and compute what one device does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.ir.graph import Graph
from passes.rules import rule_for
from passes.rules.rule import axis_choices
from tests.capture_parity import assert_parity
from tests.versions import torch_version

BATCH = 8
IMAGES = torch.rand(BATCH, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
PLACES = torch.tensor([0, 2])
EYE = 2 * torch.eye(4, dtype=torch.float64)


def grids(x: torch.Tensor) -> torch.Tensor:
    return F.grid_sample(x, F.affine_grid(x[:, :2, 0, :3], list(x.shape), align_corners=False), align_corners=False)


def squares(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT + EYE


#: Of images to something for each of them.
OPERATORS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    grids,
    lambda x: x.index_fill(2, PLACES, 0.5),
    lambda x: x.flatten(1).nanmedian(1).values,
    lambda x: torch.cat(torch.std_mean(x, 3), 1),
    lambda x: torch.logdet(squares(x)) + torch.linalg.slogdet(squares(x)).logabsdet + torch.det(squares(x)),
    lambda x: torch.linalg.eigh(squares(x)).eigenvalues + torch.linalg.svdvals(x),
    lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(squares(x)), x),
    lambda x: torch.linalg.solve(squares(x), x) + torch.linalg.qr(squares(x)).R.tril(),
    lambda x: torch.linalg.solve_triangular(squares(x).tril(), x, upper=False),
    lambda x: torch.fft.fftshift(torch.fft.hfft(torch.complex(x, x)), dim=-1),
    lambda x: F.cosine_similarity(x, x.flip(3), dim=1) + F.pairwise_distance(x, 2 * x).mean(1, keepdim=True),
    lambda x: torch.arccos(x) + torch.special.ndtri(x) + torch.special.xlogy(x, x) + torch.special.i1e(x),
    lambda x: F.margin_ranking_loss(x[:, 0, 0, 0], x[:, 1, 0, 0], x[:, 2, 0, 0].detach().sign(), reduction="none"),
]
if torch_version() >= (2, 13):  # older ones ask for the values of what q is
    OPERATORS += [
        lambda x: x.flatten(1).quantile(0.3, dim=1),
        lambda x: x.nanquantile(torch.tensor([0.2, 0.7], dtype=torch.float64), dim=3).movedim(0, -1),
    ]


class Sums(nn.Module):
    """Normalised images to one number, with running statistics and with those of each image."""

    def __init__(self, *operators: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.operators = operators
        self.scale = nn.Parameter(torch.full((3, 1, 1), 0.9, dtype=torch.float64))
        self.trained, self.frozen = (nn.InstanceNorm2d(3, affine=True, track_running_stats=True).double() for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.scale
        normalised = self.trained(scaled) + self.frozen.eval()(scaled)
        return sum(((each(scaled)).sin().mean() for each in self.operators), normalised.square().mean())


def mixing(graph: Graph) -> Iterator[str]:
    """Operators on the whole batch that no choice cuts along it."""
    for node in graph.nodes:
        inputs = [graph.values[name] for name in node.inputs]
        whole = [place for place, value in enumerate(inputs) if value.shape[:1] == (BATCH,) and value.requires_grad]
        rule = rule_for(node, graph.values)
        grads = [value.requires_grad for value in inputs], [value.requires_grad for value in node.outputs]
        choices = axis_choices(rule, input_grads=grads[0], output_grads=grads[1]) if rule is not None else ()
        if whole and not any(choice.inputs[whole[0]] == "S(0)" for choice in choices):
            yield node.op


@pytest.mark.parametrize("place", range(len(OPERATORS)))
def test_samples_are_cut_apart(place: int) -> None:
    assert list(mixing(assert_parity(Sums(OPERATORS[place]), args=(IMAGES,), tolerance=1e-9))) == []


def test_all_of_them_train_on_two_data_ranks_as_on_one_device() -> None:
    """Values, gradients, and running statistics, which are averages over the whole batch."""
    pins = {"input:*": {"dp": "S(0)"}}
    report = planner.verify(Sums(*OPERATORS), "dp=2", batch=(IMAGES,), constraints=pins)
    assert report.ok, report.table()
    whole = {node.op for node in report.plan.nodes.values() if node.strategy == ("replicate",)}
    of_statistics = {f"aten.{name}" for name in ("add.Tensor", "mul.Tensor", "reshape.default", "copy_.default")}
    assert whole <= of_statistics
