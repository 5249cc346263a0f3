"""gather_for_metrics of lists, of several rows per sample, and of means that scripts repeat for each sample of a full batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.errors import EchelonError
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings
from tests.reference import NumberStream


@dataclass
class Output:
    """What a model may return."""

    ids: torch.Tensor
    texts: list[str]


def _flat(gathered: Any) -> list[Any]:
    """Return what is in all containers, in order."""
    if isinstance(gathered, torch.Tensor):
        return gathered.flatten().tolist()
    if isinstance(gathered, Output):
        gathered = [gathered.ids, gathered.texts]
    if isinstance(gathered, dict):
        gathered = list(gathered.values())
    return [one for item in gathered for one in _flat(item)] if isinstance(gathered, (list, tuple)) else [gathered]


def _p(ids: list[int]) -> list[str]:
    return [f"p{i}" for i in ids]


# What a script passes for the samples of a batch, and what it must get for each sample, once.
KINDS: dict[str, tuple[Callable[[list[int]], Any], Callable[[int], list[Any]]]] = {
    "a list": (_p, lambda i: [f"p{i}"]),
    "two lists": (lambda ids: (_p(ids), [f"r{i}" for i in ids]), lambda i: [f"p{i}", f"r{i}"]),
    "a list of two lists, of three samples": (lambda ids: [_p(ids), ids] if len(ids) == 3 else (), lambda i: []),
    "a dict of lists": (lambda ids: {"p": _p(ids), "q": {"r": ids}}, lambda i: [f"p{i}", i]),
    "a tensor and a list": (lambda ids: (torch.tensor(ids), _p(ids)), lambda i: [i, f"p{i}"]),
    "a dataclass with a list": (lambda ids: (Output(torch.tensor(ids), _p(ids)),), lambda i: [i, f"p{i}"]),
    "lists of samples": (lambda ids: [[i] * (3 + i % 2) for i in ids], lambda i: [i] * (3 + i % 2)),
    "pairs of samples": (lambda ids: [(f"p{i}", i) for i in ids], lambda i: [f"p{i}", i]),
    "dicts of samples": (lambda ids: [{"i": i, "box": torch.tensor([i, i])} for i in ids], lambda i: [i, i, i]),
    "two texts of each sample": (lambda ids: [f"{c}{i}" for i in ids for c in "ab"], lambda i: [f"a{i}", f"b{i}"]),
    "two rows of each sample": (
        lambda ids: torch.tensor([[i, c] for i in ids for c in (8, 9)]),
        lambda i: [i, 8, i, 9],
    ),
    "five rows, and one": (
        lambda ids: {"five": torch.tensor(ids).repeat_interleave(5), "one": torch.tensor(ids)},
        lambda i: [i] * 6,
    ),
    "a list and a constant": (lambda ids: (_p(ids), None, "name"), lambda i: [f"p{i}"]),
}
OBJECTS = ("dicts of samples",)  # all of tensors: gathered as objects only if asked


def _gather(parity: str, options: dict[str, Any], num_samples: int, batch_size: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, parity=parity, dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(range(num_samples), batch_size=batch_size, collate_fn=list))  # type: ignore[arg-type]
    found: dict[str, Any] = {kind: [] for kind in KINDS}
    with torch.no_grad():
        for ids in loader:
            for kind, (make, _) in KINDS.items():
                found[kind] += _flat(accelerator.gather_for_metrics(make(ids), use_gather_object=kind in OBJECTS))
    return {
        kind: sorted((one for one in values if one not in (None, "name")), key=str) for kind, values in found.items()
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize(("parity", "world_size"), [("off", 1), ("off", 2), ("off", 3), ("exact", 2)])
def test_each_sample_is_there_once_in_all_kinds_of_results(parity: str, world_size: int) -> None:
    for num_samples, batch_size in ((7, 2), (13, 4), (10, 3)):
        found = run_on_ranks(_gather, parity, {}, num_samples, batch_size, world_size=world_size)
        for kind, (_, expected) in KINDS.items():
            if kind.startswith("a list of two lists"):
                continue
            wanted = sorted((one for i in range(num_samples) for one in expected(i)), key=str)
            assert [rank[kind] for rank in found] == [wanted] * world_size, (kind, num_samples, batch_size)


def _columns() -> list[Any]:
    """Two columns in a list: with three samples per rank they are told from samples, with two they are not."""
    accelerator = Accelerator(cpu=True)
    found: list[Any] = []
    for num_samples, batch_size in ((11, 3), (7, 2)):
        loader = accelerator.prepare(DataLoader(range(num_samples), batch_size=batch_size, collate_fn=list))  # type: ignore[arg-type]
        gathered: list[Any] = []
        try:
            for ids in loader:
                gathered += _flat(accelerator.gather_for_metrics([_p(ids), ids]))
        except EchelonError as error:
            gathered = [str(error)]
        found.append(sorted(gathered, key=str))
    return found


def test_columns_in_a_list_are_told_from_samples_or_refused() -> None:
    for clear, unclear in run_on_ranks(_columns):
        assert clear == sorted([*range(11), *_p(list(range(11)))], key=str)
        assert "cannot tell whether a list of 2 lists of 2 holds the 2 samples" in unclear[0]


def _means(parity: str, options: dict[str, Any]) -> list[Any]:
    """Return the cases in which the mean of repeated batch means is not that of the samples."""
    accelerator = Accelerator(cpu=True, parity=parity, dataloader_config=DataLoaderConfiguration(**options))
    wrong: list[Any] = []
    for num_samples, batch_size in itertools.product([1, 2, 9, 10, 12, 14], [1, 2, 4, 6]):
        if options.get("split_batches") and batch_size % accelerator.num_processes:
            continue
        if parity != "off" and batch_size < accelerator.num_processes:
            continue  # evaluation joins such batches, so that a mean repeated batch_size times has too few rows
        streams = [False] if options.get("even_batches") is False or parity != "off" else [False, True]
        for is_stream in streams:
            data: Any = NumberStream(num_samples) if is_stream else range(num_samples)
            loader = accelerator.prepare(DataLoader(data, batch_size=batch_size))
            parts, rows = [], []
            with torch.no_grad():
                for batch in loader:
                    mean = accelerator.trim_for_metrics(batch).double().mean() if len(batch) else batch.double().mean()
                    mean = torch.nan_to_num(mean)
                    parts.append(accelerator.gather_for_metrics(mean.repeat(batch_size)))
                    rows.append(len(accelerator.gather_for_metrics(batch)))
            found = torch.cat(parts)
            if abs(found.mean().item() - (num_samples - 1) / 2) > 1e-9 or len(found) != sum(rows) != num_samples:
                wrong.append((num_samples, batch_size, is_stream, found.tolist()))
    return wrong


# A mean of up to 14 integers, in float64: 1e-9 is far above its rounding.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("parity", "world_size", "options"),
    [
        ("off", 1, {}),
        ("exact", 1, {}),
        ("off", 2, {}),
        ("exact", 2, {}),
        ("bitwise", 2, {}),
        ("off", 2, {"split_batches": True}),
        ("off", 2, {"dispatch_batches": True}),
        ("off", 2, {"dispatch_batches": False}),
    ],
)
def test_repeated_means_weigh_each_sample_once(parity: str, world_size: int, options: dict[str, Any]) -> None:
    assert run_on_ranks(_means, parity, options, world_size=world_size) == [[]] * world_size


def test_one_process_keeps_what_is_not_by_sample() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(5), batch_size=4))  # type: ignore[arg-type]
    *_, last = ((batch, accelerator.gather_for_metrics((batch, torch.arange(3), torch.arange(4)))) for batch in loader)
    assert last[0].tolist() == [4]
    # One sample has three rows, or four; a script that pads its results to a full batch has other values there.
    assert [one.tolist() for one in last[1]] == [[4], [0, 1, 2], [0, 1, 2, 3]]


class TwoWorkers(IterableDataset[Any]):
    """Each worker reads the numbers up to 3, so that short batches come before the end."""

    def __iter__(self) -> Any:
        return iter(range(3))


def test_short_batches_of_workers_before_the_end_count_less() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TwoWorkers(), batch_size=2, num_workers=2))
    means = [accelerator.gather_for_metrics(batch.double().mean().repeat(2)) for batch in loader]
    assert [mean.tolist() for mean in means] == [[0.5, 0.5], [0.5, 0.5], [2.0], [2.0]]


def _none_on_one_rank() -> Any:
    accelerator = Accelerator(cpu=True)
    texts = ["a"] if accelerator.is_main_process else []
    return accelerator.gather_for_metrics(texts), accelerator.gather_for_metrics((texts, texts))


def test_a_rank_without_results_takes_part() -> None:
    assert run_on_ranks(_none_on_one_rank) == [(["a"], [["a"], ["a"], [], []])] * 2


class Squares:
    """Has no length."""

    def __getitem__(self, index: int) -> int:
        return index * index


def _metrics_of_a_sampler(data: Any) -> list[int]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(data, batch_size=2, sampler=range(5)))
    return [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]


def test_metrics_count_the_samplers_samples_not_the_datasets() -> None:
    assert run_on_ranks(_metrics_of_a_sampler, Squares()) == [[0, 1, 4, 9, 16]] * 2
    assert run_on_ranks(_metrics_of_a_sampler, list(range(8))) == [[0, 1, 2, 3, 4]] * 2


def _metrics_of_an_unprepared_loader() -> list[str]:
    accelerator = Accelerator(cpu=True)
    told = []
    for rows in (torch.arange(8), torch.arange(8) + accelerator.process_index, torch.zeros(8)):
        with all_warnings() as caught:
            accelerator.gather_for_metrics((rows, 2 * rows))
        told.append(" ".join(str(warning.message) for warning in caught))
    return told


def test_rows_that_every_process_has_are_told_outside_a_prepared_loader() -> None:
    told, by_the_other = run_on_ranks(_metrics_of_an_unprepared_loader)
    assert "the same rows from each of 2 processes" in told[0]
    assert told[1:] == ["", ""]
    assert by_the_other == ["", "", ""]  # rank zero tells
