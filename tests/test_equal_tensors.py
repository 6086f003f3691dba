"""``torch.equal`` in forward: of what is computed alike it is true, of other floats the flag selects a branch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import capture
from tests.capture_parity import assert_parity

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


class Students(nn.Module):
    """A detector whose layers each learn from the last one, which learns nothing from itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([layer(x) for layer in self.layers], dim=1)
        teacher = outputs[:, -1].reshape(-1, 4)
        loss = outputs.square().mean()
        for student in outputs.transpose(0, 1):
            student = student.reshape(-1, 4)
            if torch.equal(student, teacher):
                loss = loss + 3.0 + student.sum() * 0
            else:
                loss = loss + F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")
        return loss


def test_each_layer_takes_its_branch() -> None:
    """The last layer's tensors are computed alike; the others' branches are selected (``other_branches``)."""
    model = Students()
    graph = assert_parity(model, args=(X,))
    assert sum(node.op == "aten.equal.default" or "checked" in node.op for node in graph.nodes) == 0
    model = Students()
    model.layers[0].load_state_dict(model.layers[2].state_dict())
    assert_parity(model, args=(X,))


def test_four_devices_train_as_one() -> None:
    assert planner.verify(Students(), "dp=2,tp=2", batch=(X,), loss_fn=lambda loss, _: loss).ok


class Written(nn.Module):
    """What was equal is not any more once one of both is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        one, other = y * 2.0, y * 2.0
        other += 1.0
        return y.sum() if torch.equal(one, other) else y.square().sum()


def test_what_is_written_to_is_not_taken_for_equal() -> None:
    assert any(node.op == "aten.square.default" for node in capture(Written(), args=(X,)).nodes)
