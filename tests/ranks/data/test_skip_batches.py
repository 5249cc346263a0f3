"""The epochs after one that began with ``skip_first_batches``: each has its own order, as in a run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from echelon import Accelerator, DataLoaderConfiguration
from tests.harness import run_on_ranks
from tests.reference import EpochStream, Numbers, permutation

_SEED, _NUM, _SIZE = (
    11,
    24,
    8,
)  # the global batch divides the number of samples, and bitwise divides it by 8: no rank is padded
_STOP, _EPOCHS = (1, 1), 4  # one batch of epoch 1 has been trained on


def _prepared(parity: str, kind: str) -> tuple[Accelerator, Any]:
    config = DataLoaderConfiguration(
        data_seed=_SEED, use_seedable_sampler=True, split_batches=parity == "off", dispatch_batches=False
    )
    accelerator = Accelerator(parity=parity, dataloader_config=config)
    data: Any = EpochStream(_NUM) if kind == "stream" else Numbers(_NUM)
    loader = DataLoader(data, batch_size=_SIZE, shuffle=None if kind == "stream" else True)
    return accelerator, accelerator.prepare(loader)


def _num_micro_steps(loader: Any) -> int:
    """Return the number of micro-steps of an update: the bitwise mode divides a global batch further."""
    return len(loader) // (_NUM // _SIZE)


def _read(batches: Any, num_micro_steps: int = 1) -> list[list[int]]:
    """Return the samples that all ranks together read in each update."""
    found: list[Any] = []
    for batch in batches:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, batch.tolist())
        found.append([int(one) for part in parts for one in part])
    return [
        sorted(one for part in found[start : start + num_micro_steps] for one in part)
        for start in range(0, len(found), num_micro_steps)
    ]


def _expected(kind: str, first: tuple[int, int], epochs: int) -> list[list[int]]:
    """Return the samples of each batch from batch ``first`` (epoch, batch) on, by the documented formula of the order."""
    found = []
    for epoch in range(epochs):
        order = (
            [100 * epoch + one for one in range(_NUM)]
            if kind == "stream"
            else permutation(_NUM, seed=_SEED, epoch=epoch)
        )
        batches = [sorted(order[start : start + _SIZE]) for start in range(0, _NUM, _SIZE)]
        found += [batch for number, batch in enumerate(batches) if (epoch, number) >= first]
    return found


def _resume(folder: str, parity: str, kind: str, sets_epoch: bool) -> list[list[int]]:
    accelerator, loader = _prepared(parity, kind)
    num = _num_micro_steps(loader)
    for epoch in range(_STOP[0] + 1):
        for number, _ in enumerate(loader):
            if (epoch, number + 1) == (_STOP[0], _STOP[1] * num):
                accelerator.save_state(folder)
                break
    accelerator, loader = _prepared(parity, kind)
    accelerator.load_state(folder)
    read = []
    for epoch in range(_STOP[0], _EPOCHS):
        if sets_epoch:
            loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, _STOP[1] * num) if epoch == _STOP[0] else loader
        read += _read(batches, num)
    return read


@pytest.mark.sample(3)
@pytest.mark.parametrize("sets_epoch", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("parity", ["off", "exact", "bitwise"])
def test_each_epoch_after_a_resumed_one_has_its_own_order(
    parity: str, kind: str, sets_epoch: bool, tmp_path: Path
) -> None:
    for read in run_on_ranks(_resume, str(tmp_path / "state"), parity, kind, sets_epoch):
        assert read == _expected(kind, _STOP, _EPOCHS)


def _stop_twice(folder: str, parity: str) -> dict[str, Any]:
    accelerator, loader = _prepared(parity, "map")
    found: dict[str, Any] = {"first": _read(accelerator.skip_first_batches(loader, 1))}
    accelerator.save_state(folder)  # between two epochs, of which the first was skipped in part
    found["next epoch"] = loader.iteration
    found["twice"] = _read(accelerator.skip_first_batches(accelerator.skip_first_batches(loader, 1), 1))
    found["after twice"] = loader.iteration
    for _ in accelerator.skip_first_batches(loader, 1):
        break
    found["after a break"] = loader.iteration
    accelerator, loader = _prepared(parity, "map")
    accelerator.load_state(folder)
    found["loaded"] = _read(loader)
    skipping = accelerator.skip_first_batches(loader, 2)
    found["again and again"] = [_read(skipping) for _ in range(2)]
    found["last"] = _read(loader)
    return found


@pytest.mark.parametrize("parity", ["off", "exact"])
def test_a_pass_that_was_skipped_in_part_counts_as_an_epoch(parity: str, tmp_path: Path) -> None:
    epochs = [_expected("map", (epoch, 0), epoch + 1) for epoch in range(5)]
    for found in run_on_ranks(_stop_twice, str(tmp_path / "state"), parity):
        assert found["first"] == epochs[0][1:]
        assert found["next epoch"] == 1
        assert found["twice"] == epochs[1][2:]
        assert (found["after twice"], found["after a break"]) == (2, 2)
        assert found["loaded"] == epochs[1]
        assert found["again and again"] == [epochs[2][2:], epochs[3][2:]]
        assert found["last"] == epochs[4]
