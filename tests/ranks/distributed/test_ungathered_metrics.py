"""A metric of one rank divided by the length of the loader's dataset is reported once, at its line; correct loops do not warn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from echelon.distributed import barrier, process_group, reduce, shard
from echelon.distributed.shard import METRICS
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings

Loader = DataLoader[Any]
WHOLE = TensorDataset(torch.arange(32.0)[:, None])


class _Stream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Any:
        return (torch.ones(1) * i for i in range(self.rank, 32, self.world_size))


def _count(loader: Loader) -> torch.Tensor:
    """Return what a perfect model has right of this rank's part."""
    right = torch.zeros(())
    with torch.no_grad():
        for batch in loader:
            right += len(batch[0] if isinstance(batch, list) else batch)
    return right


def _divided_after(loader: Loader) -> float:
    return float(_count(loader)) / len(loader.dataset)  # type: ignore[arg-type] # the wrong line


def _asked_before(loader: Loader) -> float:
    size = len(loader.dataset)  # type: ignore[arg-type] # the wrong line
    return float(_count(loader)) / size


def _in_every_epoch(loader: Loader) -> float:
    train = shard(DataLoader(WHOLE, batch_size=4))
    for _ in range(3):
        result = float(_count(loader)) / len(loader.dataset)  # type: ignore[arg-type] # the wrong line
        for _ in train:
            pass
    return result


def _batch_norm(loader: Loader) -> float:
    model = DistributedDataParallel(
        torch.nn.BatchNorm1d(1)
    ).eval()  # its forward pass shares buffers: no result is shared
    right = 0
    with torch.no_grad():
        for (x,) in loader:
            right += len(model(x))
    return right / len(loader.dataset)  # type: ignore[arg-type] # the wrong line


def _within_training(loader: Loader) -> float:
    model, train = DistributedDataParallel(torch.nn.Linear(1, 1)), shard(DataLoader(WHOLE, batch_size=4))
    for (x,) in train:
        model(x).mean().backward()
        result = float(_count(loader)) / len(loader.dataset)  # type: ignore[arg-type] # the wrong line
    return result


def _on_rank_zero(loader: Loader) -> float:
    right = _count(loader)
    if dist.get_rank() == 0:
        print(float(right) / len(loader.dataset))  # type: ignore[arg-type] # the wrong line
    return 0.0


class _Tester:
    def __init__(self, loader: Loader) -> None:
        self.loader, self.right = loader, 0.0

    def run(self) -> float:
        with torch.no_grad():
            for (x,) in self.loader:
                self.right += len(x)
        return self.right / len(self.loader.dataset)  # type: ignore[arg-type] # the wrong line


def _in_a_method(loader: Loader) -> float:
    return _Tester(loader).run()


WRONG: dict[str, Callable[[Loader], float]] = {
    "on rank zero": _on_rank_zero,
    "in a method": _in_a_method,
    "after": _divided_after,
    "before": _asked_before,
    "in every epoch": _in_every_epoch,
    "batch norm": _batch_norm,
    "within training": _within_training,
}


def _reduced(loader: Loader) -> float:
    return float(reduce(_count(loader), "sum")) / len(loader.dataset)  # type: ignore[arg-type]


def _reduced_by_torch(loader: Loader) -> float:
    right = _count(loader)
    result = right / len(loader.dataset)  # type: ignore[arg-type]
    dist.all_reduce(result)
    return float(result)


def _gathered_in_a_group(loader: Loader) -> float:
    group = dist.new_group(backend="gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, float(_count(loader)), group=group)
    return float(sum(found) / len(loader.dataset))  # type: ignore[arg-type]


def _reduced_in_the_loop(loader: Loader) -> float:
    right = 0.0
    with torch.no_grad():
        for (x,) in loader:
            right += float(reduce(torch.tensor(float(len(x))), "sum"))
    return right / len(loader.dataset)  # type: ignore[arg-type]


def _several_then_reduced(loader: Loader) -> float:
    other = shard(DataLoader(WHOLE, batch_size=4))
    rates = torch.stack([_count(one) / len(one.dataset) for one in (loader, other)])  # type: ignore[arg-type]
    dist.all_reduce(rates)
    return float(rates.mean())


def _counted_by_itself(loader: Loader) -> float:
    num = 0
    with torch.no_grad():
        for (x,) in loader:
            num += len(x)
    return float(_count(loader)) / num


def _by_batches(loader: Loader) -> float:
    with torch.no_grad():
        return sum(1.0 for _, _ in zip(loader, range(len(loader)))) / len(loader)


def _training(loader: Loader) -> float:
    total = 0.0
    for (x,) in loader:
        total += len(x)
        print(f"{total} of {len(loader.dataset)}")  # type: ignore[arg-type]
    return total / len(loader.dataset)  # type: ignore[arg-type]


def _length_of_the_other(loader: Loader) -> float:
    train = shard(DataLoader(WHOLE, batch_size=4))
    for (x,) in train:
        print(f"{len(x)} of {len(train.dataset)}")  # type: ignore[arg-type]
    return _counted_by_itself(loader)


def _barrier_then_reduced(loader: Loader) -> float:
    size = len(loader.dataset)  # type: ignore[arg-type]
    right = _count(loader)
    barrier()
    return float(reduce(right, "sum")) / size


RIGHT: dict[str, Callable[[Loader], float]] = {
    "barrier, then reduced": _barrier_then_reduced,
    "reduce": _reduced,
    "all_reduce": _reduced_by_torch,
    "another group": _gathered_in_a_group,
    "in the loop": _reduced_in_the_loop,
    "several, then reduced": _several_then_reduced,
    "own count": _counted_by_itself,
    "len(loader)": _by_batches,
    "training": _training,
    "another loader's length": _length_of_the_other,
}


def _said(evaluate: Callable[[Loader], float], make: Callable[[], Loader]) -> list[tuple[str, str, int]]:
    with all_warnings() as caught:
        with process_group():
            evaluate(make())
    return [(str(one.message), one.filename, one.lineno) for one in caught]


def _plain() -> Loader:
    return shard(DataLoader(WHOLE, batch_size=4))


def _own_cut() -> Loader:
    return shard(DataLoader(WHOLE, batch_size=4, sampler=DistributedSampler(WHOLE, shuffle=False)))


def _workers() -> Loader:
    return shard(DataLoader(WHOLE, batch_size=4, num_workers=1))


def _stream() -> Loader:
    return shard(DataLoader(_Stream(), batch_size=4), already_sharded=True)


@pytest.mark.parametrize("name", WRONG)
def test_a_ranks_result_divided_by_the_total_length_is_reported_once(name: str) -> None:
    first, second = run_on_ranks(_said, WRONG[name], _plain, init_group=False)
    assert second == []
    ((message, file, line),) = first
    assert "nothing was gathered or reduced" in message
    assert 'echelon.distributed.reduce(total, "sum")' in message
    assert file == __file__
    text = Path(__file__).read_text().splitlines()[line - 1]
    assert "# the wrong line" in text


_SETUP = """
import torch, torch.distributed as dist
from echelon.distributed import barrier, gather, process_group, reduce, shard
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(24.0)[:, None])
loader = shard(DataLoader(data, batch_size=4))
"""
_SIZES = ("len(loader.dataset)", "float(len(loader.dataset))", "size")
_LOOPS = (
    "right = torch.zeros(())\nwith torch.no_grad():\n    for (x,) in loader:\n        right += (x > 3).sum()\n",
    "parts = []\nwith torch.no_grad():\n    for (x,) in loader:\n        parts.append((x > 3).sum())\nright = sum(parts)\n",
    "with torch.no_grad():\n    right = sum((x > 3).sum() for (x,) in loader)\n",
    "def count(loader):\n    right = torch.zeros(())\n    for (x,) in loader:\n        right += (x > 3).sum()\n    return right\n"
    "with torch.no_grad():\n    right = count(loader)\n",
)
_SHARES = (
    "right = reduce(right, 'sum')\n",
    "dist.all_reduce(right)\n",
    "right = gather(right[None]).sum()\n",
    "barrier()\nright = reduce(right, 'sum')\n",
    "found = [None] * dist.get_world_size()\ndist.all_gather_object(found, right)\nright = sum(found)\n",
)
_LATER = ("", "with torch.no_grad():\n    for (x,) in loader:\n        x.mean()\n")


def _program(size: str, loop: str, share: str, later: str, *, is_divided_first: bool) -> str:
    length = "size = len(loader.dataset)\n" if size == "size" else ""
    division = f"right = right / {size}\n"
    return length + loop + (division + share if is_divided_first else share + division) + later


def _warnings_of(programs: list[str]) -> list[int]:
    numbers = []
    with process_group():
        for number, text in enumerate(programs):
            name, source = f"loop_{number}.py", _SETUP + text
            with all_warnings() as caught:
                exec(compile(source, name, "exec"), {"__name__": name})
                METRICS.check()  # as at the end of the process group
            numbers.append(len(caught))
    return numbers


def test_drawn_correct_loops_do_not_warn_and_each_warns_without_its_reduction() -> None:
    every = list(itertools.product(_SIZES, _LOOPS, _SHARES, _LATER, (False, True)))
    drawn = random.Random(24).sample(every, 12)
    correct = [_program(size, loop, share, later, is_divided_first=first) for size, loop, share, later, first in drawn]
    wrong = [_program(size, loop, "", later, is_divided_first=first) for size, loop, _, later, first in drawn]
    for programs, is_wrong in ((correct, 0), (wrong, 1)):
        first_rank, second_rank = run_on_ranks(_warnings_of, programs, init_group=False)
        assert [text for text, number in zip(programs, first_rank) if number != is_wrong] == []
        assert sum(second_rank) == 0


@pytest.mark.parametrize("make", [_own_cut, _workers, _stream])
def test_ungathered_metrics_are_reported_for_every_kind_of_sharding(make: Callable[[], Loader]) -> None:
    first, second = run_on_ranks(_said, _divided_after, make, init_group=False)
    assert (len(first), second) == (1, [])


@pytest.mark.parametrize("name", RIGHT)
def test_correct_loops_do_not_warn(name: str) -> None:
    assert run_on_ranks(_said, RIGHT[name], _plain, init_group=False) == [[], []]


def _length_in_the_line_of_the_loop(loader: Loader) -> float:
    with torch.no_grad():
        right = sum(1.0 for _, _ in zip(range(len(loader)), loader))
        right += len(list(loader))
    return right


def test_a_stream_that_uses_its_own_length_does_not_warn() -> None:
    assert run_on_ranks(_said, _length_in_the_line_of_the_loop, _stream, init_group=False) == [[], []]


def _fail() -> None:
    with process_group():
        _divided_after(_plain())
        raise ValueError("mine")


def _failed() -> list[str]:
    with all_warnings() as caught:
        with pytest.raises(ValueError, match="mine"):
            _fail()
        with process_group():  # nothing is left of it
            pass
    return [str(one.message) for one in caught]


def test_an_error_before_the_results_are_shared_suppresses_the_warning() -> None:
    assert run_on_ranks(_failed, init_group=False) == [[], []]


def test_one_process_has_all_the_data() -> None:
    assert run_on_ranks(_said, _divided_after, _plain, world_size=1, init_group=False) == [[]]
