"""One rank of the tests of scripts that change two lines; rank 0 says how far each is from one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import planner
from planner.verification.verify_model import slow_devices
from runtime.checkpoint import whole_optimizer_state
from runtime.mesh.communication_counter import CommunicationCounter
from tests.ranks import answer, task
from tests.small_models import Mlp, TiedClassifier, seeded, token_batch
from tests.tracing import traced_once


def difference(actual: Any, expected: Any) -> float:
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    return float((actual - expected).abs().max() / expected.abs().max())


def loop_by_hand(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[float]:
    """Losses and norms of a loop that knows nothing of planners; everything it holds is made before the first call."""
    groups = list(parameters)
    optimizer = torch.optim.AdamW([{"params": groups[:2], "lr": 1e-2}, {"params": groups[2:], "lr": 1e-3}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    figures = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**token_batch())["loss"]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(groups, 0.1)
        optimizer.step()
        schedule.step()
        figures += [float(loss.detach()), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)]
    return figures


def weights_apart(parallel: planner.ParallelModule, model: nn.Module) -> float:
    weights = parallel.full_state_dict()
    return max(difference(weights[name], tensor) for name, tensor in model.state_dict().items())


def a_loop_by_hand_changes_one_line() -> float:
    model = seeded(TiedClassifier)
    parallel = planner.compile(seeded(TiedClassifier))
    actual, expected = loop_by_hand(parallel, parallel.parameters()), loop_by_hand(model, model.parameters())
    assert parallel.plan.step.num_devices == 2 and parallel.plan.step.axes["pp"] == 1
    return max(difference(actual, expected), weights_apart(parallel, model))


def a_batch_that_ranks_cannot_share_counts_once() -> float:
    """Beside one that they share, with a loss that the script makes of several outputs."""
    model, parallel = seeded(TiedClassifier), planner.compile(seeded(TiedClassifier), fix={"dp": 2})
    for module in (model, parallel):
        for rows in (None, 3):
            outputs = module(**{name: tensor[:rows] for name, tensor in token_batch().items()})
            (outputs["loss"] + outputs["logits"].square().mean()).backward()
    gradients = parallel.full_gradients()
    return max(difference(gradients[name], one.grad) for name, one in model.named_parameters() if one.grad is not None)


class MeanSquare(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(inputs).square().mean()}


def gradients_reach_what_made_an_input() -> float:
    """A batch that asks for none comes first; then one that ranks share, and one that they cannot."""
    model = seeded(lambda: MeanSquare(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    made = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    worst = 0.0
    for axis in ("dp", "tp"):
        options = {"example_inputs": (made,), "fix": {axis: 2}}
        parallel = planner.compile(copy.deepcopy(model), slow_devices(2), **options)
        for rows in (8, 5):
            gradients = []
            for module in (parallel, model):
                inputs = made[:rows].clone().requires_grad_(True)
                module(inputs)["loss"].backward()
                gradients.append(inputs.grad)
            worst = max(worst, difference(*gradients))
        if axis == "dp":
            with pytest.raises(ValueError, match="input 0 needs a gradient: pass the whole batch"):
                parallel(made[:4].requires_grad_(True), local_inputs=True)
    return worst


class WeightsMadeFirst(nn.Module):
    """Every weight is made into another before it meets a sample; one is tied and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.Linear(8, 8, bias=False)
        self.scale, self.down, self.up = (nn.Parameter(torch.randn(*shape)) for shape in ((8, 1), (2, 8), (8, 2)))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = nn.functional.embedding(tokens, self.embedding.weight * self.scale.flatten())
        x = self.normed(x) * (1 + self.scale.reshape(1, 1, 8))
        x = nn.functional.linear(x, self.spectral.weight / self.spectral.weight.square().sum().sqrt())
        merged = self.up @ self.down + torch.eye(8, dtype=x.dtype)
        x = x @ (merged / torch.linalg.vector_norm(merged, dim=1, keepdim=True)).t()
        logits = x @ self.embedding.weight.t()
        penalty = 0.1 * self.down.square().mean()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + penalty}


def weights_that_are_made_first_are_reduced_once() -> float:
    """In backward their own bytes are reduced, not those of what is made of them too."""
    tokens = torch.randint(0, 12, (4, 3), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens.flip(0)}
    model = seeded(WeightsMadeFirst)
    parallel = planner.compile(seeded(WeightsMadeFirst), "pp=1,dp=2", example_inputs=batch, fix={"zero": 0})
    with CommunicationCounter(parallel.device_mesh) as counter:
        actual = parallel.train_step(**batch)
    loss = model(**batch)["loss"]
    loss.backward()
    backward = {kind: count[1] for (kind, _, phase), count in counter.counts.items() if phase == "backward"}
    assert backward == {"all_reduce": 8 * sum(one.numel() for one in model.parameters())}, backward
    gradients = parallel.full_gradients()
    apart = [difference(gradients[name], one.grad) for name, one in model.named_parameters()]
    return max(difference(actual, loss.detach()), *apart)


def the_first_train_step_may_plan_a_pipeline() -> float:
    """An optimizer that was made before keeps this stage's parameters alone."""
    model = seeded(TiedClassifier)
    parallel = planner.compile(seeded(TiedClassifier), fix={"pp": 2})
    losses = []
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (parallel, model)]
    for _ in range(3):
        loss = model(**token_batch())["loss"]
        loss.backward()
        losses.append(difference(parallel.train_step(**token_batch()), loss.detach()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(optimizers[0].param_groups[0]["params"]) == len(list(parallel.parameters()))
    assert parallel.num_parameters() == sum(parameter.numel() for parameter in model.parameters())
    return max(*losses, weights_apart(parallel, model))


def state_from_before_the_plan_is_cut_as_the_plan_cuts_weights() -> float:
    """Adagrad's, which is there before the first step: it is saved, and trains on, as its parameters are placed."""
    apart = []
    for mesh in ("pp=2", "tp=2"):
        model = seeded(TiedClassifier)
        parallel = planner.compile(seeded(TiedClassifier), mesh, cluster=slow_devices(2), fix={"zero": 0})
        optimizers = [torch.optim.Adagrad(module.parameters(), lr=0.1) for module in (parallel, model)]
        for _ in range(3):
            loss = model(**token_batch())["loss"]
            loss.backward()
            apart.append(difference(parallel.train_step(**token_batch()), loss.detach()))
            saved = whole_optimizer_state(parallel, optimizers[0])["state"]
            sums = {name: optimizers[1].state[one]["sum"] for name, one in model.named_parameters()}
            assert {entry["sum"].shape for entry in saved.values()} == {value.shape for value in sums.values()}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        own, placed = optimizers[0], optimizers[0].state_dict()["state"]
        assert len(placed) == len(list(parallel.parameters()))
        for parameter in parallel.parameters():
            assert own.state[parameter]["sum"].to_local().shape == parameter.to_local().shape
        apart.append(weights_apart(parallel, model))
    return max(apart)


class Prompted(nn.Module):
    """Trained vectors before the tokens, added to frozen embeddings; a table that nothing else reads weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8).requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(2, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 12)
        self.register_buffer("weights", torch.arange(12.0) % 3)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        prompt = (self.embedding(torch.arange(2)) + self.prompt).expand(len(tokens), 2, 8)
        x = torch.cat([prompt, self.embedding(tokens)], dim=1)
        labels = torch.cat([labels.new_full((len(labels), 2), -100), labels], dim=1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x).flatten(0, 1)
        weighed = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / self.weights[tokens].sum()
        return {"loss": weighed + nn.functional.cross_entropy(logits, labels.flatten())}


def totals_read_states_of_other_stages() -> float:
    """The first stage's, and one that no stage reads; constants of the prompt are no part of them."""
    batch = {"tokens": torch.arange(32).reshape(8, 4) % 12, "labels": torch.arange(32).reshape(8, 4) % 7}
    model, options = seeded(Prompted), {"fix": {"pp": 2, "num_microbatches": 2}}
    parallel = planner.compile(seeded(Prompted), slow_devices(2), example_inputs=batch, **options)
    loss = model(**batch)["loss"]
    loss.backward()
    apart = [difference(parallel.train_step(**batch), loss.detach())]
    gradients = parallel.full_gradients()
    return max(apart + [difference(gradients[name], p.grad) for name, p in model.named_parameters() if p.requires_grad])


class SmoothedInTraining(TiedClassifier):
    """Does in training mode what it does not in evaluation mode, with samples and with the loss."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs: dict[str, torch.Tensor] = super().forward(tokens, labels)
        if self.training:
            smooth = torch.tanh(outputs["logits"]).square().mean()
            outputs = {"loss": outputs["loss"] + smooth, "logits": outputs["logits"]}
        return outputs


def micro_batches_of_a_model_compiled_in_evaluation_mode() -> float:
    """As ``from_pretrained`` hands models out; there are operators then that the plan does not know."""
    model, options = seeded(SmoothedInTraining), {"fix": {"pp": 2, "num_microbatches": 2}}
    compiled = seeded(SmoothedInTraining).eval()
    parallel = planner.compile(compiled, slow_devices(2), example_inputs=token_batch(), **options)
    apart = []
    for module_mode in (True, False):
        model.zero_grad()
        parallel.zero_grad()
        loss = model.train(module_mode)(**token_batch())["loss"]
        loss.backward()
        apart.append(difference(parallel.train(module_mode).train_step(**token_batch()), loss.detach()))
        gradients = parallel.full_gradients()
        apart += [difference(gradients[name], one.grad) for name, one in model.named_parameters() if name in gradients]
    return max(apart)


class SumOverTokens(nn.Module):
    """Attention over tokens, and a loss that is a sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mixing = nn.Embedding(32, 16), nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        query, key, value = self.mixing(x).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.down(torch.tanh(self.up(x)))
        return (x.square().mean(-1) * mask).sum() / 100


def lengths_that_an_axis_does_not_divide() -> float:
    """Planned for eight tokens on an axis that cuts them; then of seven and five, in micro-batches, and of eight."""
    model = seeded(SumOverTokens)

    def batch(length: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(4 * length).reshape(4, length) % 29
        return {"tokens": tokens, "mask": (tokens % 5 > 0).double()}

    fix = {"cp": 2, "pp": 1, "dp": 1, "tp": 1, "num_microbatches": 2}
    parallel = planner.compile(seeded(SumOverTokens), slow_devices(2), example_inputs=batch(8), fix=fix)
    assert "S(1), dst=R)" in parallel.program.source
    apart = []
    for length in (8, 7, 5, 8):
        model.zero_grad()
        parallel.zero_grad()
        loss = model(**batch(length))
        loss.backward()
        apart.append(difference(parallel.train_step(**batch(length)), loss.detach()))
        gradients = parallel.full_gradients()
        apart += [difference(gradients[name], one.grad) for name, one in model.named_parameters()]
    with torch.no_grad():
        apart.append(difference(parallel.eval()(**batch(9)), model.eval()(**batch(9))))
    return max(apart)


def gradients_in_evaluation_mode() -> float:
    """Of outputs that are no loss, under a plan that was made in training mode; and once it is left by hand."""
    model, parallel = seeded(Mlp), planner.compile(seeded(Mlp), fix={"dp": 2})
    x = torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(8, 16)
    apart = []
    for mode in (True, False, True):
        for module in (model, parallel):
            module.eval()
            for one in module.modules():
                one.training = mode  # as Lightning does after an evaluation
            module.zero_grad()
            module(x).square().mean().backward()
        assert parallel.original.training == mode
        gradients = parallel.full_gradients()
        apart += [difference(gradients[name], one.grad) for name, one in model.named_parameters()]
    return max(apart)


SCENARIOS: tuple[Callable[[], float], ...] = (
    a_loop_by_hand_changes_one_line,
    a_batch_that_ranks_cannot_share_counts_once,
    gradients_reach_what_made_an_input,
    weights_that_are_made_first_are_reduced_once,
    the_first_train_step_may_plan_a_pipeline,
    state_from_before_the_plan_is_cut_as_the_plan_cuts_weights,
    totals_read_states_of_other_stages,
    micro_batches_of_a_model_compiled_in_evaluation_mode,
    gradients_in_evaluation_mode,
    lengths_that_an_axis_does_not_divide,
)

if __name__ == "__main__":
    task()
    with traced_once():
        answer({scenario.__name__: scenario() for scenario in SCENARIOS})
