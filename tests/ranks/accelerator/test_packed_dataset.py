"""Packed rows: the losses of the tokens, and the updates, are those of the examples alone, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator, PackedDataset, packed_attention_mask
from echelon.base.errors import UsageError
from echelon.distributed.collectives import gather_object
from echelon.trainer import Trainer
from tests.harness import import_ahead, run_on_ranks
from tests.parallel_models import IGNORED, VOCABULARY, loss_without_float32, new_optimizer, tiny_gpt, tiny_llama
from tests.reference import permutation
from tests.trainer_models import CONSTANT_SGD, EndsAfter, arguments

import_ahead("transformers.models.llama.modeling_llama")

_LENGTH = 24


def _examples(num: int = 26) -> list[dict[str, Any]]:
    """Examples of 2 to 20 tokens, some of whose labels are ignored; each token has a number."""
    generator = torch.Generator().manual_seed(3)
    found, start = [], 0
    for _ in range(num):
        size = int(torch.randint(2, 21, (), generator=generator))
        tokens = torch.randint(VOCABULARY, (size,), generator=generator)
        labels = torch.where(torch.rand(size, generator=generator) < 0.2, IGNORED, tokens)
        numbers = list(range(start, start + size))
        found.append({"input_ids": tokens.tolist(), "labels": labels, "number": numbers})
        start += size
    return found


def _alone(model: Any, example: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of an example's targets, and their numbers."""
    tokens = torch.tensor(example["input_ids"])[None]
    labels, numbers = example["labels"][1:], torch.tensor(example["number"])[1:]
    logits = model(input_ids=tokens).logits[0, :-1]
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return losses[labels != IGNORED], numbers[labels != IGNORED]


def _of_tokens(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1]
    labels, numbers = batch["labels"][:, 1:], batch["number"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses[labels != IGNORED], numbers[labels != IGNORED]


def _trained(attention: str) -> tuple[dict[int, float], list[torch.Tensor]]:
    accelerator = Accelerator(cpu=True, parity="exact", seed=7, gradient_accumulation_steps=2)
    model: Any = tiny_llama(attention=attention)
    loader = DataLoader(PackedDataset(_examples(), _LENGTH, seed=5), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), loader)
    found: dict[int, float] = {}
    for batch in loader:
        with accelerator.accumulate(model):
            losses, numbers = _of_tokens(model, batch)
            found |= dict(zip(numbers.tolist(), losses.tolist()))
            accelerator.backward(losses.sum() / max(1, len(losses)), num_items=len(losses))
            optimizer.step()
            optimizer.zero_grad()
    merged: dict[int, float] = {}
    for part in gather_object([found]):
        merged |= part
    return merged, [p.detach().clone() for p in model.parameters()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_losses_of_tokens_and_updates_are_those_of_the_examples_alone(attention: str, world_size: int) -> None:
    examples, rows = _examples(), PackedDataset(_examples(), _LENGTH, seed=5).rows
    order = permutation(len(rows), seed=7, epoch=0)
    # eager computes its softmax in float32
    bound = 1e-12 if attention == "sdpa" else 1e-5
    model: Any = tiny_llama(attention=attention)
    optimizer = new_optimizer(model)
    expected: dict[int, float] = {}
    for start in range(0, len(order), 4):
        parts = [_alone(model, examples[i]) for row in order[start : start + 4] for i in rows[row]]
        total = sum(len(losses) for losses, _ in parts)
        for losses, numbers in parts:
            expected |= dict(zip(numbers.tolist(), losses.tolist()))
            (losses.sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, weights in run_on_ranks(_trained, attention, world_size=world_size):
        assert found.keys() == expected.keys()
        assert max(abs(found[key] - value) for key, value in expected.items()) <= bound
        if attention == "sdpa":
            for value, parameter in zip(weights, model.parameters()):
                torch.testing.assert_close(value, parameter.detach(), rtol=0, atol=1e-12)


def test_every_token_is_in_one_row_and_rows_depend_on_the_seed_only() -> None:
    examples = _examples()
    one, same, other = (PackedDataset(examples, _LENGTH, seed=seed) for seed in (1, 1, 2))
    assert one.rows == same.rows
    assert one.rows != other.rows
    assert len(one) == len(other)
    assert sorted(i for row in one.rows for i in row) == list(range(len(examples)))
    total = sum(len(example["input_ids"]) for example in examples)
    assert len(one) <= total // _LENGTH + 2  # rows are nearly full
    counted = 0
    for i, numbers in enumerate(one.rows):
        row = one[i]
        assert all(len(column) == _LENGTH for column in row.values())
        start = 0
        for number in numbers:
            size = len(examples[number]["input_ids"])
            part = slice(start, start + size)
            assert row["input_ids"][part].tolist() == examples[number]["input_ids"]
            assert row["position_ids"][part].tolist() == list(range(size))
            assert row["labels"][start] == IGNORED
            assert torch.equal(row["labels"][part][1:], examples[number]["labels"][1:])
            start += size
        counted += start
        assert (row["labels"][start:] == IGNORED).all()
        assert row["position_ids"][start:].tolist() == list(range(_LENGTH - start))
    assert counted == total


def test_the_mask_separates_examples_in_a_model_of_ones_own() -> None:
    rows = PackedDataset([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], 8, shifts_labels=False)
    row = rows[0]
    assert row["labels"].tolist() == [1, 2, 3, 4, 5, -100, -100, -100]
    mask = packed_attention_mask(row["position_ids"][None])[0, 0].int()
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in (3, 2, 3))).int()
    assert torch.equal(mask, expected)


def test_tokens_that_a_mask_leaves_out_are_not_packed() -> None:
    data = [
        {"input_ids": [0, 7, 8, 9], "attention_mask": [0, 1, 1, 1]},
        {"input_ids": [5, 6], "attention_mask": [1, 1]},
    ]
    row = PackedDataset(data, 5)[0]
    assert row["input_ids"].tolist() == [7, 8, 9, 5, 6]
    assert row["labels"].tolist() == [-100, 8, 9, -100, 6]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([{"input_ids": [1] * 9}], "sample 0 has 9 tokens, but rows of 8 tokens hold only whole samples"),
        ([{"text": "a"}], "sample 0 has no 'input_ids', only text"),
        ([{"input_ids": [[1, 2]]}], r"the input_ids of sample 0 have shape \[1, 2\]"),
        (iter([]), "has no length"),
    ],
)
def test_data_that_cannot_be_packed_is_refused(data: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        PackedDataset(data, 8)


def test_a_column_without_a_value_for_each_token_is_refused() -> None:
    with pytest.raises(UsageError, match="column 'score' of sample 0 does not have a value for each of its 2 tokens"):
        PackedDataset([{"input_ids": [1, 2], "score": 0.5}], 8)[0]


# ---- the Trainer -------------------------------------------------------------------------------------------------------


def _without_numbers() -> list[dict[str, Any]]:
    return [{key: value for key, value in example.items() if key != "number"} for example in _examples()]


def _llama() -> Any:
    model: Any = tiny_llama()
    model.loss_function = loss_without_float32
    return model


def _trainer(folder: str, until: int | None) -> list[torch.Tensor]:
    args = arguments(
        folder,
        **CONSTANT_SGD,
        parity="exact",
        global_batch_size=4,
        pack_to_length=_LENGTH,
        save_strategy="no" if until is None else "steps",
    )
    trainer = Trainer(_llama(), args, train_dataset=_without_numbers(), callbacks=[EndsAfter(until)])
    trainer.train(resume_from_checkpoint="auto")
    return [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_sizes", [(3, 1), (2, 2)])
def test_a_trainers_packed_run_is_that_of_the_examples_and_resumes_in_mid_epoch(
    world_sizes: tuple[int, int], tmp_path: Path
) -> None:
    examples, rows = _examples(), PackedDataset(_examples(), _LENGTH, seed=42).rows
    order = permutation(len(rows), seed=42, epoch=0)
    model = _llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(order), 4):
        parts = [_alone(model, examples[i])[0] for row in order[start : start + 4] for i in rows[row]]
        (sum(part.sum() for part in parts) / sum(map(len, parts))).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    run_on_ranks(_trainer, str(tmp_path), 2, world_size=world_sizes[0])
    assert (tmp_path / "checkpoint-2").is_dir()
    for weights in run_on_ranks(_trainer, str(tmp_path), None, world_size=world_sizes[1]):
        for value, parameter in zip(weights, model.parameters()):
            torch.testing.assert_close(value, parameter.detach(), rtol=0, atol=1e-12)


class _Mixing(nn.Module):
    """A model that takes positions, but lets each token see all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_gpt(dtype=torch.float32)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: Any = None
    ) -> dict[str, torch.Tensor]:
        logits = self.inner(input_ids, position_ids)
        return {
            "logits": logits,
            **({} if labels is None else {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}),
        }


class _Counting(_Mixing):
    """A model that counts the positions of a row itself, though its attention would separate the examples."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: Any = None
    ) -> dict[str, torch.Tensor]:
        positions = torch.arange(input_ids.shape[1])
        return {
            "logits": self.inner.head(self.inner.embedding(input_ids) + self.inner.position(positions)),
            "loss": torch.ones(()),
        }


class _WithoutPositions(_Mixing):
    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(input_ids, torch.arange(input_ids.shape[1])[None], labels)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (_Mixing, "the outputs of _Mixing for an example depend on the one before it"),
        (_Counting, "the outputs of _Counting for an example are not those that it has alone"),
        (_WithoutPositions, "_WithoutPositions.forward does not take position_ids"),
    ],
)
def test_a_model_that_does_not_separate_examples_is_refused(model: Any, text: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, pack_to_length=_LENGTH, **CONSTANT_SGD)
    with pytest.raises(UsageError, match=text):
        Trainer(model(), args, train_dataset=_without_numbers()).train()


def test_another_collator_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, pack_to_length=_LENGTH)
    trainer = Trainer(_llama(), args, data_collator=lambda rows: rows, train_dataset=_without_numbers())
    with pytest.raises(UsageError, match=r"which the data_collator .* would change"):
        trainer.train()
