"""Dispatched batches whose columns have different lengths: each sample arrives once with all of its rows, or an error names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.errors import EchelonError
from echelon.distributed.collectives import gather_object
from tests.harness import run_on_ranks


class Stream(IterableDataset[Any]):
    """The numbers from 0, or what ``make`` makes of them."""

    def __init__(self, num_samples: int, make: Callable[[int], Any] = int) -> None:
        self.num_samples = num_samples
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.num_samples))


def _x(samples: list[Any]) -> torch.Tensor:
    return torch.tensor(samples)


# What collate_fn makes of the samples 0, 1, ..., and what each sample must arrive with.
REFUSED: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "two rows per sample": (
        lambda s: {"ids": _x(s), "patches": torch.tensor([[i, c] for i in s for c in (0, 1)])},
        "batch['ids']: 2, batch['patches']: 4 for 2 samples",
    ),
    "only two rows per sample": (lambda s: _x([i for i in s for _ in (0, 1)]), "batch: 4 for 2 samples"),
    "rows of some samples": (
        lambda s: {"ids": _x(s), "boxes": torch.zeros(sum(s), 4)},
        "batch['ids']: 2, batch['boxes']: 1 for 2 samples",
    ),
    "a constant list first": (
        lambda s: {"tags": ["train"], "x": _x(s)},
        "batch['tags']: 1, batch['x']: 2 for 2 samples",
    ),
    "a constant list last": (lambda s: (_x(s), {"tags": ["a", "b", "c"]}), "batch[0]: 2, batch[1]['tags']: 3"),
    "a constant tensor": (lambda s: {"x": _x(s), "weights": torch.ones(3)}, "batch['weights']: 3 for 2 samples"),
    "one tensor for all": (lambda s: {"x": _x(s), "scale": torch.ones(1)}, "batch['scale']: 1 for 2 samples"),
    "lists of samples": (
        lambda s: {"x": _x(s), "words": [["w"] * (1 + i % 3) for i in s]},
        "batch['words'][0]: 1, batch['words'][1]: 2 for 2 samples",
    ),
    "a square list of lists": (
        lambda s: {"x": _x(s), "pairs": [[str(i), str(i)] for i in s]},
        "batch['pairs'] is a list of 2 lists of 2",
    ),
    "pairs that are not collated": (list, "its columns do not all have one row per sample"),
}
TAKEN: dict[str, tuple[Callable[[list[Any]], Any], Callable[[Any], list[int]]]] = {
    "tensors and texts": (
        lambda s: {"x": _x(s), "names": [str(i) for i in s], "all": None, "mode": "train", "no": []},
        lambda b: [i for i, name in zip(b["x"].tolist(), b["names"], strict=True) if str(i) == name and b["no"] == []],
    ),
    "columns in a tuple": (
        lambda s: ([str(i) for i in s], [str(-i) for i in s]),
        lambda b: [int(i) for i, j in zip(*b, strict=True) if int(i) == -int(j)],
    ),
    "samples as dicts": (lambda s: [{"i": i, "words": ["w"] * i} for i in s], lambda b: [one["i"] for one in b]),
    "rows in a second dimension": (
        lambda s: {"patches": torch.tensor([[[i, c] for c in (0, 1)] for i in s])},
        lambda b: [rows[0][0] for rows in b["patches"].tolist() if rows == [[rows[0][0], 0], [rows[0][0], 1]]],
    ),
}


def _read(parity: str, batch_size: int, options: dict[str, Any], num_samples: int = 8) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True, parity=parity, dataloader_config=DataLoaderConfiguration(dispatch_batches=True, **options)
    )
    found: dict[str, Any] = {}
    for kind, (collate, _) in REFUSED.items():
        make: Callable[[int], Any] = (lambda i: [str(i), [str(i)] * 3]) if kind.startswith("pairs") else int
        loader = accelerator.prepare(DataLoader(Stream(num_samples, make), batch_size=batch_size, collate_fn=collate))
        try:
            found[kind] = len([*loader])
        except EchelonError as error:
            found[kind] = str(error)
    for kind, (collate, samples) in TAKEN.items():
        loader = accelerator.prepare(DataLoader(Stream(num_samples), batch_size=batch_size, collate_fn=collate))
        # A rank whose canonical shard is empty has a padding sample.
        own = [i for batch in loader for i in accelerator.trim_for_metrics(samples(batch))]
        found[kind] = sorted(gather_object(own))
    return found


@pytest.mark.parametrize(
    ("parity", "options"), [("off", {}), ("off", {"split_batches": True}), ("exact", {}), ("bitwise", {})]
)
def test_columns_that_are_not_by_sample_are_refused_by_name(parity: str, options: dict[str, Any]) -> None:
    for rank, found in enumerate(run_on_ranks(_read, parity, 2, options)):
        for kind, (_, lengths) in REFUSED.items():
            assert lengths in str(found[kind]), (kind, found[kind])
            assert rank or "dispatch_batches=False" in found[kind], found[kind]
        assert {kind: found[kind] for kind in TAKEN} == {kind: list(range(8)) for kind in TAKEN}


def _default() -> list[Any]:
    """Pairs of texts, which torch collates into two columns, and dicts of tensors in short batches."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    pairs = accelerator.prepare(DataLoader(Stream(8, lambda i: [str(i), str(-i)]), batch_size=2))
    single = accelerator.prepare(DataLoader(Stream(4, lambda i: {"x": float(i), "tag": "t"}), batch_size=1))
    texts = [(i, j) for batch in pairs for i, j in zip(*batch, strict=True)]
    return [texts, [(batch["x"].tolist(), batch["tag"]) for batch in single]]


def test_what_torch_collates_is_split_by_sample() -> None:
    found = run_on_ranks(_default)
    assert sorted(found[0][0] + found[1][0]) == sorted((str(i), str(-i)) for i in range(8))
    assert [found[0][1], found[1][1]] == [[([0.0], ["t"]), ([2.0], ["t"])], [([1.0], ["t"]), ([3.0], ["t"])]]


def _undispatched() -> list[Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    collate = REFUSED["two rows per sample"][0]
    return [b["patches"].tolist() for b in accelerator.prepare(DataLoader(Stream(8), batch_size=2, collate_fn=collate))]


def test_the_remedy_gives_each_rank_whole_samples() -> None:
    rows = [row for rank in run_on_ranks(_undispatched) for batch in rank for row in batch]
    assert sorted(rows) == [[i, c] for i in range(8) for c in (0, 1)]


def test_one_process_reads_any_columns() -> None:
    accelerator = Accelerator(cpu=True)
    for collate, _ in REFUSED.values():
        plain = DataLoader(Stream(7), batch_size=2, collate_fn=collate)
        assert [str(batch) for batch in accelerator.prepare(plain)] == [str(batch) for batch in plain]
