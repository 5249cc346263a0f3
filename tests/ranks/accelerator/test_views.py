"""Pickling of Accelerators, and join, checkpoints and loaders as scripts for Accelerate use them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.state import AcceleratorState, GradientState
from echelon.tracking import GeneralTracker, on_main_process
from tests.harness import run_on_ranks

_FACTS = ("num_processes", "process_index", "device", "distributed_type", "mixed_precision")


def _pickled() -> dict[str, Any]:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3, split_batches=True)
    model = nn.Linear(2, 1)
    model, optimizer, _ = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(range(8), batch_size=2)
    )
    accelerator.step = 4
    copy = pickle.loads(pickle.dumps(accelerator))
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1
    return {
        "facts": [getattr(copy.state, name) == getattr(accelerator.state, name) for name in _FACTS],
        "settings": (
            copy.gradient_accumulation_steps,
            copy.split_batches,
            copy.step,
            copy.config == accelerator.config,
        ),
        "current": AcceleratorState().device is copy.device and GradientState().num_steps,
        "prepared": [len(kept) for kept in (copy._models, copy._optimizers, copy._dataloaders)],
        "works": float(copy.gather(torch.ones(1)).sum()),
        "trains": type(copy.prepare(nn.Linear(2, 1))) is type(model),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_accelerator_pickles_its_settings_but_not_prepared_objects(world_size: int) -> None:
    expected = {
        "facts": [True] * len(_FACTS),
        "settings": (3, True, 4, True),
        "current": 3,
        "prepared": [0, 0, 0],
        "works": float(world_size),
        "trains": True,
    }
    assert run_on_ranks(_pickled, world_size=world_size) == [expected] * world_size


def _joined() -> tuple[str, bool]:
    accelerator = Accelerator()
    frozen = nn.Linear(2, 1).requires_grad_(False)
    frozen = accelerator.prepare(frozen)
    with accelerator.join_uneven_inputs([frozen]):  # without gradients to reduce, nothing has to join
        entered = True
    with pytest.raises(UsageError) as caught:
        with accelerator.join_uneven_inputs([frozen, nn.Linear(2, 1)]):
            pass
    return str(caught.value), entered


def test_joining_an_unprepared_model_is_an_error() -> None:
    for text, entered in run_on_ranks(_joined):
        assert entered
        assert "join_uneven_inputs() got objects that were not prepared by this Accelerator: Linear" in text
        assert "do:    pass the models that prepare() returned" in text


class _Count(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def _overridden(dispatch: bool) -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(_Count(), batch_size=2))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        ragged = torch.cat(list(loader)).tolist()
    return [ragged, torch.cat(list(loader)).tolist()]


@pytest.mark.parametrize(
    ("dispatch", "expected"),
    [
        (False, [[[0, 1, 4], [2, 3]], [[0, 1, 4, 0], [2, 3, 1, 2]]]),
        (True, [[[0, 1, 4], [2, 3]], [[0, 1, 4], [2, 3, 0]]]),
    ],
)
def test_join_overrides_even_batches_of_iterable_data(dispatch: bool, expected: list[list[list[int]]]) -> None:
    ragged, even = zip(*run_on_ranks(_overridden, dispatch))
    assert [list(ragged), list(even)] == expected


def _saved(folder: str) -> tuple[list[str], float, list[str]]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    mine = Path(folder, str(dist.get_rank()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EchelonWarning)
        accelerator.save_state(str(mine))
        before = accelerator.unwrap_model(model).weight.item()
        with torch.no_grad():
            accelerator.unwrap_model(model).weight.zero_()
        accelerator.load_state(str(mine))
    restored = accelerator.unwrap_model(model).weight.item() - before
    told = [str(w.message) for w in caught if issubclass(w.category, EchelonWarning)]
    return sorted(path.name for path in Path(folder).iterdir()), restored, told


def test_all_ranks_use_the_folder_of_the_first_rank(tmp_path: Path) -> None:
    (folders, difference, told), (_, other, silent) = run_on_ranks(_saved, str(tmp_path))
    assert (folders, difference, other) == (["0"], 0.0, 0.0)
    assert [text.split(" got")[0] for text in told] == ["save_state()", "load_state()"]
    assert (
        f"on ranks 1 than on the first rank of their machine. All ranks must share one checkpoint folder; these ranks use {tmp_path}/0"
        in told[0]
    )
    assert silent == []


def _remainders(kind: str) -> tuple[list[tuple[bool, int]], list[int]]:
    accelerator = Accelerator(cpu=True)
    data: Any = _Count() if kind == "iterable" else list(range(8 if kind == "full" else 10))
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    state = accelerator.gradient_state
    seen, gathered = [], []
    for batch in loader:
        seen.append((state.end_of_dataloader, state.remainder))
        gathered += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
    assert state.remainder == -1  # nothing is being read
    return seen, gathered


@pytest.mark.parametrize(
    ("kind", "expected", "num_samples"),
    [
        ("rest", [(False, 2), (False, 2), (True, 2)], 10),  # 10 samples, 4 in a step of both ranks
        ("full", [(False, 0), (True, 0)], 8),
        ("iterable", [(False, -1), (True, 1)], 5),  # known at the end
    ],
)
def test_the_remainder_is_known_in_every_step(kind: str, expected: list[tuple[bool, int]], num_samples: int) -> None:
    assert run_on_ranks(_remainders, kind) == [(expected, list(range(num_samples)))] * 2


class _Notes(GeneralTracker):
    requires_logging_directory = False

    def __init__(self, name: str, *, main_only: bool) -> None:
        self.name = name
        self.main_process_only = main_only
        self.notes: list[Any] = []
        super().__init__()

    @property
    def tracker(self) -> list[Any]:
        return self.notes

    @on_main_process
    def start(self) -> None:
        self.notes.append("start")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.notes.append((values["rank"], step))

    @on_main_process
    def finish(self) -> None:
        self.notes.append("finish")


def _tracked() -> tuple[list[str], list[Any], list[Any]]:
    everywhere, main = _Notes("everywhere", main_only=False), _Notes("main", main_only=True)
    accelerator = Accelerator(log_with=[everywhere, main])
    assert accelerator.trackers == []
    accelerator.init_trackers("run")
    names = [tracker.name for tracker in accelerator.trackers]
    assert accelerator.get_tracker("main") is main
    assert accelerator.get_tracker("everywhere", unwrap=True) is everywhere.notes
    accelerator.log({"rank": accelerator.process_index}, step=4)
    accelerator._tracking.finish()
    return names, everywhere.notes, main.notes


def test_every_rank_has_the_trackers_and_each_writes_on_its_ranks() -> None:
    assert run_on_ranks(_tracked) == [
        (["everywhere", "main"], ["start", (rank, 4), "finish"], ["start", (0, 4), "finish"] if rank == 0 else [])
        for rank in (0, 1)
    ]
