"""``parity="exact"``: evaluation results are those of one process, with each sample once and in the order of the data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.errors import UsageError
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings
from tests.reference import Numbers, NumberStream


def _collate(samples: list[torch.Tensor]) -> dict[str, Any]:
    x = torch.stack(samples)
    return {"x": x, "nested": (x.double()[:, None] * 2, [x % 3 == 0]), "names": [f"n{i}" for i in x.tolist()]}


class Accuracy:
    """A streaming metric like those of torchmetrics: ``update`` in the loop, and one exchange in ``compute``."""

    def __init__(self) -> None:
        self.correct = torch.zeros((), dtype=torch.int64)
        self.total = torch.zeros((), dtype=torch.int64)

    def update(self, predicted: torch.Tensor, expected: torch.Tensor) -> None:
        self.correct += (predicted == expected).sum()
        self.total += len(expected)

    def compute(self) -> tuple[int, int]:
        sums = torch.stack([self.correct, self.total])
        if dist.is_initialized():
            dist.all_reduce(sums)
        return int(sums[0]), int(sums[1])


def _is_right(x: torch.Tensor) -> torch.Tensor:
    return x % 3 == 0


_SIZES = (0, 1, 2, 3, 4, 6, 11)


def _evaluate_all(kind: str, max_micro: int | None) -> list[Any]:
    """Return the cases that were wrong."""
    wrong: list[Any] = []
    dispatches = kind.startswith("dispatched")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    for n, batch_size in itertools.product(_SIZES, (1, 2, 5) if kind.endswith("map") else (2, 5)):
        accelerator = Accelerator(
            parity="exact",
            max_micro_batch_size=max_micro,
            dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches),
        )
        torch.manual_seed(0)
        model: Any = accelerator.prepare(nn.Linear(1, 1)) if n == 3 else None
        has_data = not dispatches or accelerator.is_main_process
        data: Any = (NumberStream if kind.endswith("stream") else Numbers)(n if has_data else 0)
        plain = DataLoader(data, batch_size=batch_size, collate_fn=_collate)
        loader: Any = accelerator.prepare(plain)
        if model is not None:
            model.eval()
        gathered: list[Any] = [[], [], []]
        steps, has_loans = 0, False
        trimmed, naive = Accuracy(), Accuracy()
        with nullcontext() if model is not None else torch.no_grad():
            for batch in loader:
                steps += 1
                x, nested, names = batch["x"], batch["nested"], batch["names"]
                doubled, thirds = accelerator.gather_for_metrics(nested)
                gathered[0] += doubled[:, 0].tolist()
                gathered[1] += thirds[0].tolist()
                gathered[2] += accelerator.gather_for_metrics(names)
                has_loans |= loader.last_step is not None and min(loader.last_step.real) == 0
                naive.update(_is_right(x), torch.ones_like(x, dtype=torch.bool))
                mine = accelerator.trim_for_metrics({"x": x, "thirds": nested[1][0]})
                trimmed.update(_is_right(mine["x"]), torch.ones_like(mine["x"], dtype=torch.bool))
                if len(x) > max(-(-batch_size // world_size) + 1, 1) or (max_micro and len(x) > max_micro):
                    wrong.append((n, batch_size, "size", len(x)))
            length = len(loader)
        numbers = list(range(n))
        expected = [[2.0 * i for i in numbers], [i % 3 == 0 for i in numbers], [f"n{i}" for i in numbers]]
        right = (sum(i % 3 == 0 for i in numbers), n)
        if gathered != expected or steps != length:
            wrong.append((n, batch_size, gathered, steps, length))
        if trimmed.compute() != right:
            wrong.append((n, batch_size, "trimmed", trimmed.compute()))
        # Without checks for padding samples, sums are correct if every rank has a sample in every step.
        if max_micro is None and has_loans != (0 < n < world_size):
            wrong.append((n, batch_size, "loans"))
        summed = (int(accelerator.reduce(naive.correct)), int(accelerator.reduce(naive.total)))
        if not has_loans and summed != right:
            wrong.append((n, batch_size, "sums", summed))
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_evaluation_results_match_one_process(world_size: int) -> None:
    kinds: list[tuple[str, int | None]] = [("map", None), ("stream", None)]
    kinds += [("dispatched stream", None), ("map", 1)] if world_size % 2 else [("dispatched map", None), ("stream", 2)]
    for kind, max_micro in kinds:
        found = run_on_ranks(_evaluate_all, kind, max_micro, world_size=world_size)
        assert found == [[]] * world_size, kind


# ---- ranks without samples -----------------------------------------------------------------------------------


def _sum_without_a_look(n: int) -> Any:
    accelerator = Accelerator(parity="exact", seed=0)
    loader: Any = accelerator.prepare(DataLoader(Numbers(n), batch_size=4))
    warned: list[str] = []
    total = torch.zeros((), dtype=torch.int64)
    for _ in range(2):
        total = torch.zeros((), dtype=torch.int64)
        with torch.no_grad(), all_warnings() as caught:
            for x in loader:
                total += len(x)
        warned += [str(w.message) for w in caught]
    return int(accelerator.reduce(total)), warned


def test_a_sum_that_counts_a_padding_sample_is_reported_once() -> None:
    for rank, (total, warned) in enumerate(run_on_ranks(_sum_without_a_look, 2, world_size=3)):
        assert total == 3
        assert len(warned) == (rank == 0)
        if rank == 0:
            assert "has only 2 samples for 3 processes, so rank(s) 2 received a padding sample" in warned[0]
            assert "accelerator.trim_for_metrics" in warned[0]
    assert run_on_ranks(_sum_without_a_look, 5, world_size=3) == [(5, [])] * 3  # 4 + 1 samples: joined


class Buckets(Sampler[list[int]]):
    """A custom batch sampler, whose batches may have different shapes."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2, 3], [4], [5, 6])


def _own_batches() -> Any:
    accelerator = Accelerator(parity="exact", seed=0)
    loader: Any = accelerator.prepare(DataLoader(Numbers(7), batch_sampler=Buckets()))
    sizes, mine = [], []
    with torch.no_grad():
        for x in loader:
            sizes.append(len(accelerator.gather_for_metrics(x)))
            mine.append(len(accelerator.trim_for_metrics(x)))
    return sizes, mine, len(loader)


def test_batches_of_a_custom_batch_sampler_are_not_joined() -> None:
    ranks = run_on_ranks(_own_batches, world_size=3)
    assert [sizes for sizes, _, _ in ranks] == [[4, 1, 2]] * 3
    assert [mine for _, mine, _ in ranks] == [[2, 1, 1], [1, 0, 1], [1, 0, 0]]
    assert [length for _, _, length in ranks] == [3] * 3


def _by_chance() -> Any:
    """Rank 0 has two of the 3 samples of a step, so a table of two rows looks like samples there."""
    accelerator = Accelerator(parity="exact", seed=0)
    loader: Any = accelerator.prepare(DataLoader(Numbers(3), batch_size=3))
    found: list[Any] = []
    with torch.no_grad():
        for x in loader:
            table = torch.full((2, 2), float(accelerator.process_index))
            samples, tables = accelerator.gather_for_metrics((x, table))
            found = [samples, tables[:, 0], accelerator.gather_for_metrics(torch.tensor(1.0))]
    return [one.tolist() for one in found]


def test_a_tensor_that_does_not_hold_samples_is_gathered_whole() -> None:
    assert run_on_ranks(_by_chance) == [[[0, 1, 2], [0.0, 0.0, 1.0, 1.0], [1.0, 1.0]]] * 2


def _skip_in_an_evaluation() -> list[Any]:
    accelerator = Accelerator(parity="exact", seed=0)
    loader: Any = accelerator.prepare(DataLoader(Numbers(9), batch_size=4))
    found = []
    with torch.no_grad():
        for number in range(3):
            rest = accelerator.skip_first_batches(loader, number)
            found.append([accelerator.gather_for_metrics(x).tolist() for x in rest])
    return found


def test_steps_of_an_evaluation_can_be_skipped() -> None:
    steps = [[0, 1, 2, 3], [4, 5, 6, 7, 8]]  # the ninth batch alone would leave two ranks without samples
    assert run_on_ranks(_skip_in_an_evaluation, world_size=3) == [[steps, steps[1:], []]] * 3


def _train_in_an_evaluation() -> str:
    accelerator = Accelerator(parity="exact", seed=0)
    model: Any = accelerator.prepare(nn.Linear(1, 1).double())
    loader: Any = accelerator.prepare(DataLoader(Numbers(5), batch_size=2))
    model.eval()
    text = ""
    for x in loader:
        with accelerator.accumulate(model), pytest.raises(UsageError) as error:
            accelerator.backward(model(x[:, None].double()).mean())
        text = str(error.value)
    return text


def test_training_in_an_evaluation_pass_is_an_error() -> None:
    for text in run_on_ranks(_train_in_an_evaluation, world_size=3):
        assert "backward() was called in a pass that started as an evaluation" in text
        assert "model.train()" in text


def _with_workers() -> Any:
    """Use persistent workers for a training pass, then for two evaluations."""
    accelerator = Accelerator(
        parity="exact",
        seed=0,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
    )
    loader: Any = accelerator.prepare(
        DataLoader(NumberStream(11), batch_size=3, num_workers=2, persistent_workers=True, prefetch_factor=4)
    )
    steps = sum(1 for _ in loader)
    found = []
    with torch.no_grad():
        for _ in range(2):
            found.append([accelerator.gather_for_metrics(x).tolist() for x in loader])
    loader.inner._iterator._shutdown_workers()  # otherwise the garbage collector does it, and waits 5 s for each
    return steps, found


def test_persistent_workers_adapt_to_the_next_pass() -> None:
    # Worker 0 has 0, 2, ..., 10: 3 + 3 samples; worker 1 has 1, 3, ..., 9: 3 + 2.
    expected = [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9]]
    for steps, found in run_on_ranks(_with_workers):
        assert steps == 7  # 2 + 2 + 2 + 1 micro-steps
        assert found == [expected, expected]
