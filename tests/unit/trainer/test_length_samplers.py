"""Batches of about equal cost (train_sampling_strategy="batch_rebalance"), beside a search over all divisions."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.trainer import Trainer, TrainingArguments
from echelon.trainer.data.length_samplers import BalancedBatchSampler, balanced_sizes
from tests.harness import run_on_ranks


def _cost(batch: list[int]) -> float:
    """All samples of a batch are padded to the longest; attention costs a thousandth of the square more."""
    return len(batch) * (max(batch) + 0.001 * max(batch) ** 2)


def _lengths(n: int, seed: int) -> list[int]:
    return torch.randint(1, 400, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("n", "num_batches"), [(4, 4), (7, 3), (11, 4), (12, 2), (9, 1)])
def test_the_maximum_batch_cost_is_minimal(n: int, num_batches: int) -> None:
    for seed in range(20):
        lengths = sorted(_lengths(n, seed), reverse=True)
        sizes = balanced_sizes(lengths, num_batches=num_batches)
        assert (sum(sizes), len(sizes), min(sizes) > 0) == (n, num_batches, True)
        costs = []
        for cuts in combinations(range(1, n), num_batches - 1):
            edges = [0, *cuts, n]
            costs.append(max(_cost(lengths[a:b]) for a, b in pairwise(edges)))
        ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        assert max(_cost(lengths[a:b]) for a, b in pairwise(ends)) == pytest.approx(min(costs), rel=1e-9)


@pytest.mark.parametrize(("n", "drop_last"), [(64, False), (70, False), (70, True), (65, False), (77, False)])
def test_every_update_has_its_samples_and_every_rank_its_share(n: int, drop_last: bool) -> None:
    lengths = _lengths(n, 3)
    sampler = BalancedBatchSampler(
        lengths, samples_per_update=32, num_ranks=4, num_rounds=2, seed=5, drop_last=drop_last
    )
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert len(batches) % 4 == 0
        order = torch.randperm(n, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        for update in range(n // 32):
            part = batches[8 * update : 8 * update + 8]
            assert sorted(i for batch in part for i in batch) == sorted(order[32 * update : 32 * update + 32])
            costs = [_cost([lengths[i] for i in batch]) for batch in part]
            assert costs == sorted(costs, reverse=True)  # a round's batches, one a rank, are neighbours
        tail = sorted(i for batch in batches[8 * (n // 32) :] for i in batch)
        rest = order[n - n % 32 :] if n % 32 else []
        if drop_last:
            assert tail == []
        elif len(rest) < 4:
            assert tail == sorted(rest + order[: 4 - len(rest)] if rest else [])
        else:
            assert tail == sorted(rest)


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, input_ids: Any, number: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        self.seen.append(sorted(number.tolist()))
        return {"loss": self.weight * input_ids.float().mean()}


def _pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "number": torch.tensor([row["number"] for row in rows])}


def _train(folder: str, lengths: list[int]) -> list[list[int]]:
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, seed=5,
        train_sampling_strategy="batch_rebalance", save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    rows = [{"input_ids": [1] * length, "number": i} for i, length in enumerate(lengths)]
    model = Sums()
    trainer = Trainer(model, args, _pad, train_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 2 * 2
    return model.seen


def test_two_ranks_train_on_the_batches_of_every_update(tmp_path: Path) -> None:
    lengths = _lengths(20, 8)
    seen = run_on_ranks(_train, str(tmp_path), lengths, world_size=2)
    sampler = BalancedBatchSampler(lengths, samples_per_update=16, num_ranks=2, num_rounds=2, seed=5, drop_last=False)
    for rank in (0, 1):
        expected = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            expected += [sorted(batch) for batch in list(sampler)[rank::2]]
        assert seen[rank] == expected
    first = sorted(i for rank in (0, 1) for batch in seen[rank][:2] for i in batch)
    assert first == sorted(torch.randperm(20, generator=torch.Generator().manual_seed(5)).tolist()[:16])
