"""Samples of any length: buckets, padding that changes nothing, packed rows."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq, LlamaConfig, LlamaForCausalLM, default_data_collator

import planner
from runtime.data.length_buckets import padding_share
from runtime.data.packing import first_fit_decreasing
from runtime.data.padding import PaddedCollator, gives_several_lengths, read_padding


@pytest.mark.parametrize("waste", [0.0, 0.05, 0.2, 1.0])
@pytest.mark.parametrize("counts", [{3: 5, 4: 1, 9: 2, 10: 7, 16: 1}, dict.fromkeys(range(1, 9), 1), {7: 3}])
def test_buckets_are_the_fewest_and_of_those_the_best(counts: dict[int, int], waste: float) -> None:
    """Beside every set of buckets that there is."""
    *shorter, longest = sorted(counts)
    sets = [(*some, longest) for size in range(len(shorter) + 1) for some in combinations(shorter, size)]
    fewest = min(len(buckets) for buckets in sets if padding_share(counts, buckets) <= waste)
    least = min(padding_share(counts, buckets) for buckets in sets if len(buckets) == fewest)

    buckets = planner.length_buckets(counts, waste=waste)

    assert len(buckets) == fewest and padding_share(counts, buckets) == pytest.approx(least, abs=1e-12)


def test_fifty_lengths_need_four_buckets() -> None:
    """Lengths of batches, each the longest of 32 samples of a skewed distribution, at 12% of padding."""
    torch.manual_seed(0)
    draws = torch.distributions.LogNormal(4.0, 0.5).sample((2000, 32)).long().clamp(8, 256).amax(1).tolist()
    counts = dict(Counter(draws).most_common(50))
    buckets = planner.length_buckets(counts, waste=0.12, multiple_of=8)
    assert len(counts) == 50 and len(buckets) <= 4 and all(size % 8 == 0 for size in buckets)
    with pytest.raises(ValueError, match=r"at most 1 buckets fill .*, more than waste=5.0%"):
        planner.length_buckets(counts, waste=0.05, max_buckets=1)


def test_a_collator_fills_what_the_loss_and_the_attention_leave_out() -> None:
    samples = [{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": [7] * n, "weight": 1.0} for n in (3, 5)]
    batch = PaddedCollator(read_padding([4, 6, 8]))(samples)
    assert batch["input_ids"].tolist() == [[5] * 3 + [0] * 3, [5] * 5 + [0]]
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 3, [1] * 5 + [0]]
    assert batch["labels"].tolist() == [[7] * 3 + [-100] * 3, [7] * 5 + [-100]]
    assert batch["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "pad_to", "message"),
    [
        (("input_ids",), [8], "give batches an attention_mask as long as it, or, where .* pad_values={'input_ids': 0}"),
        (("input_ids", "attention_mask"), [4], "a length of 5 is longer than the largest bucket, 4"),
        (("input_ids", "attention_mask", "short_labels"), [8], "as long as no other field: .* pad_to={'labels'"),
        (("input_ids",), [0.5], "whole numbers from 1 on"),
    ],
)
def test_filling_that_might_change_the_loss_is_refused(fields: tuple[str, ...], pad_to: Any, message: str) -> None:
    sample = {name.removeprefix("short_"): [1] * (3 if "short" in name else 5) for name in fields}
    with pytest.raises(ValueError, match=message):
        PaddedCollator(read_padding(pad_to))([sample])


class Ragged:
    """Samples of 1 to 16 tokens."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(1, 64, (1 + 7 * n % 16,), generator=generator) for n in range(num_samples)]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


class Group:
    def __init__(self, data_rank: int, num_data_ranks: int) -> None:
        self.data_rank, self.num_data_ranks = data_rank, num_data_ranks


@pytest.mark.parametrize("collate_fn", [None, PaddedCollator(read_padding([16]))])
def test_groups_pad_their_parts_of_a_batch_alike(collate_fn: Any) -> None:
    dataset = Ragged(16)
    options: dict[str, Any] = {"batch_size": 4, "pad_to": (16,) if collate_fn else (4, 8, 16), "collate_fn": collate_fn}
    lengths = planner.sample_lengths(dataset)
    groups = [planner.DataLoader(dataset, Group(rank, 2), lengths=lengths, **options) for rank in (0, 1)]
    for whole, *parts in zip(planner.DataLoader(dataset, **options), *groups, strict=True):
        assert all(torch.equal(torch.cat([part[name] for part in parts]), whole[name]) for name in whole)
    with pytest.raises(ValueError, match="give lengths="):
        planner.DataLoader(dataset, Group(0, 2), **options)
    with pytest.raises(ValueError, match=r"lengths= has 3 numbers, the dataset 16 samples"):
        planner.DataLoader(dataset, Group(0, 2), lengths=[1, 2, 3], **options)


def test_packed_rows_have_the_loss_and_gradients_of_the_samples_one_by_one() -> None:
    """On a parallel module, beside the eager model called on each sample alone."""
    dataset = Ragged(8)
    packed = planner.PackedDataset(dataset, 24)
    assert sorted(index for row in packed.rows for index in row) == list(range(8)) and packed.filling < 0.2
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).double()
    losses = [
        model(input_ids=tokens[None], labels=tokens[None]).loss * (len(tokens) - 1)
        for tokens in dataset.tokens
        if len(tokens) > 1
    ]
    expected = sum(losses) / sum(len(tokens) - 1 for tokens in dataset.tokens)
    gradients = torch.autograd.grad(expected, list(model.parameters()))

    (batch,) = planner.DataLoader(packed, batch_size=len(packed))
    parallel = planner.compile(model, "cpu-local:1", example_inputs=batch)
    torch.testing.assert_close(parallel.train_step(**batch), expected.detach(), rtol=1e-9, atol=0)
    for own, gradient in zip(parallel.parameters(), gradients, strict=True):
        # Llama computes norms and its loss in float32 whatever its parameters are.
        torch.testing.assert_close(own.grad.full_tensor(), gradient, rtol=1e-5, atol=1e-7)


def test_first_fit_takes_the_first_bin_with_room() -> None:
    assert first_fit_decreasing([2, 5, 4, 7, 1, 3], 8) == [[3, 4], [1, 5], [2, 0]]


def test_a_sample_that_is_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample \d+ has \d+ tokens, a row 4"):
        planner.PackedDataset(Ragged(8), 4)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call of ``torch.export``."""
    calls: list[Any] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return calls


class Encoder(nn.Module):
    """Attention over tokens with masks and positions of any length, and a shape of its own for long texts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 8), nn.Embedding(64, 8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, length = input_ids.shape
        x = self.tokens(input_ids) + self.positions(torch.arange(length, device=input_ids.device))
        q, k, v = (part.view(rows, length, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, 8))
        if length > 12:
            x = x * 2
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 32, (rows, length), generator=generator)
    return {"input_ids": tokens, "mask": torch.rand(tokens.shape, generator=generator) < 0.9, "labels": tokens}


def assert_trains_alike(parallel: Any, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """A step has the loss and the gradients of the eager model."""
    loss = model(**batch)["loss"]
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    parallel.zero_grad()
    torch.testing.assert_close(parallel.train_step(**batch), loss.detach(), rtol=1e-9, atol=0)
    for own, gradient in zip(parallel.parameters(), gradients, strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), gradient, rtol=1e-9, atol=1e-12)


def test_one_capture_serves_all_lengths(exports: list[Any]) -> None:
    """Beside the eager model; a length at which forward branches takes another capture."""
    torch.manual_seed(0)
    model = Encoder().double()
    parallel = planner.compile(model, "cpu-local:1", example_inputs=text(4, 6))
    counts = []
    for length in (7, 9, 12, 5, 11, 6, 20, 25):
        exports.clear()
        assert_trains_alike(parallel, model, text(4, length))
        counts.append(len(exports))
    assert counts == [1, 0, 0, 0, 0, 0, 1, 0]


def test_a_dynamic_model_is_captured_once(exports: list[Any]) -> None:
    """For lengths and rows of any number, from the first program on; beside the eager model."""
    torch.manual_seed(0)
    model = Encoder().double()
    parallel = planner.compile(model, "dp=1", example_inputs=text(4, 6), dynamic=True)
    for rows, length in ((4, 6), (4, 9), (3, 12), (4, 2)):
        assert_trains_alike(parallel, model, text(rows, length))
    assert len(exports) == 1
    parallel.train_step(**text(4, 1))  # of one token every operator has a case of its own
    assert len(exports) == 2


def test_collators_say_that_lengths_will_differ() -> None:
    tokenizer: Any = None
    assert gives_several_lengths(DataCollatorForSeq2Seq(tokenizer)) and gives_several_lengths(
        PaddedCollator(read_padding([4, 8]))
    )
    assert not gives_several_lengths(default_data_collator)
    assert not gives_several_lengths(DataCollatorForSeq2Seq(tokenizer, padding="max_length"))
    assert not gives_several_lengths(PaddedCollator(read_padding([8])))


def test_a_new_program_says_what_it_cost(caplog: pytest.LogCaptureFixture) -> None:
    parallel = planner.compile(Encoder(), "cpu-local:1", example_inputs=text(2, 6))
    with caplog.at_level("INFO", logger="meshwright.programs"):
        for _ in range(2):
            parallel.train_step(**text(2, 8))
    lines = [record.getMessage() for record in caplog.records if record.name == "meshwright.programs"]
    assert len(lines) == 2  # once
    assert lines[0].startswith("Encoder captured for any size of the dims that changed in ")
    assert lines[1].startswith("a new program of Encoder in ") and "input_ids [2, 8]" in lines[1]
