"""Ranks that differ only on axes other than the data-parallel ones read the same samples and count once.

No layer is split here, so that everything else is tested alone: 4 ranks as 2 readers of 2 ranks each compute what a plain loop in
one process computes.
"""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration, ParallelismConfig
from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.data_loader import prepare_data_loader
from echelon.utils import TorchTensorParallelConfig
from tests.harness import run_on_ranks
from tests.prepared_loop import whole
from tests.reference import gaussian, tanh_net

_LAYOUTS: dict[str, dict[str, int]] = {
    "2 readers": {"dp_replicate_size": 2, "tp_size": 2},
    "2 readers, sharded": {"dp_shard_size": 2, "tp_size": 2},
    "2 readers, context": {"dp_replicate_size": 2, "cp_size": 2},
    "2 readers, sharded over sequences": {"dp_shard_size": 2, "sp_size": 2},
    "1 reader": {"tp_size": 4},
}


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*_data()))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(22), gaussian(22, 8)


def _trained(sizes: dict[str, int], kind: str, parity: str) -> dict[str, Any]:
    # Each rank computes whole samples here.
    warnings.filterwarnings("ignore", ".*ran outside accelerator.context_parallel", EchelonWarning)
    accelerator = Accelerator(
        cpu=True,
        parity=parity,
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**sizes, tp_handler=TorchTensorParallelConfig(plan={"*": "replicate"})),
        dataloader_config=DataLoaderConfiguration(dispatch_batches=True if kind == "dispatch" else None),
    )
    torch.manual_seed(accelerator.process_index if kind == "other seeds" else 7)
    dataset: Any = _Stream() if kind == "stream" else TensorDataset(*_data())
    shuffle = kind not in ("stream", "dispatch")
    num_readers = sizes.get("dp_replicate_size", 1) * sizes.get("dp_shard_size", 1)
    batch_size = 8 if parity == "exact" else 8 // num_readers
    loader: Any = DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)
    model: Any = tanh_net(8, 4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    read, gathered = [], []
    for numbers, rows in loader:
        read.append(numbers.tolist())
        with accelerator.accumulate(model):
            losses, items = model(rows).square().mean(1), _num_items(numbers)
            if kind == "items":
                accelerator.backward((losses * items).sum() / items.sum(), num_items=items.sum())
            else:
                accelerator.backward(losses.mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        gathered.append(accelerator.gather_for_metrics(numbers).tolist())
    return {
        "read": read,
        "gathered": gathered,
        "sum": accelerator.reduce(torch.tensor(float(sum(map(len, read)))), "sum").item(),
        "rows": len(accelerator.gather(torch.zeros(1))),
        "rate": schedule.get_last_lr()[0],
        "weights": torch.cat([whole(p).flatten() for p in model.parameters()]).tolist(),
    }


def _num_items(numbers: torch.Tensor) -> torch.Tensor:
    """Return the weight of each sample, such as its number of tokens."""
    return 1.0 + numbers % 5


def _plain(order: list[list[int]], kind: str) -> list[float]:
    """Train on the batches in ``order``, each of which is a whole update."""
    model = tanh_net(8, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    for numbers in order:
        losses, items = model(_data()[1][numbers]).square().mean(1), _num_items(torch.tensor(numbers))
        weights = items if kind == "items" else torch.ones_like(items)
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


_KINDS = ["shuffled", "items", "other seeds", "stream", "dispatch"]


def _cases() -> list[Any]:
    """Two kinds of data for each layout with exact parity, and all kinds for one layout without; the others are for `make soak`."""
    cases = []
    for i, layout in enumerate(_LAYOUTS):
        for k, kind in enumerate(_KINDS):
            cases.append(pytest.param("exact", layout, kind, marks=() if (k - i) % 5 in (0, 2) else pytest.mark.soak))
            cases.append(pytest.param("off", layout, kind, marks=() if layout == "2 readers" else pytest.mark.soak))
    return cases


@pytest.mark.sample(4)
@pytest.mark.parametrize(("parity", "layout", "kind"), _cases())
def test_the_ranks_of_a_group_are_one_reader(layout: str, kind: str, parity: str) -> None:
    sizes = _LAYOUTS[layout]
    num_readers = sizes.get("dp_replicate_size", 1) * sizes.get("dp_shard_size", 1)
    answers = run_on_ranks(_trained, sizes, kind, parity, world_size=4)
    width = 4 // num_readers
    for rank, answer in enumerate(answers):
        assert answer["read"] == answers[rank - rank % width]["read"]
        assert answer["rows"] == num_readers
        assert answer["weights"] == answers[0]["weights"]
    assert sorted(chain(*answers[0]["gathered"])) == list(range(22))
    assert answers[0]["sum"] == (22 if parity == "exact" else sum(len(b) for a in answers[::width] for b in a["read"]))
    if parity == "exact":
        order = [list(chain(*answers[0]["gathered"][n : n + 2])) for n in range(0, len(answers[0]["gathered"]), 2)]
        torch.testing.assert_close(  # float64: sums in another order
            torch.tensor(answers[0]["weights"], dtype=torch.float64),
            torch.tensor(_plain(order, kind), dtype=torch.float64),
            rtol=0,
            atol=1e-12,
        )
        assert answers[0]["rate"] == pytest.approx(0.1 * 0.9**3)
    else:  # 3 micro-steps are 2 updates, and as in Accelerate, a schedule advances once per reader and update
        assert answers[0]["rate"] == pytest.approx(0.1 * 0.9 ** (2 * num_readers))


def _read(kind: str) -> list[list[int]]:
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=ParallelismConfig(tp_size=2),
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=kind == "dispatch", split_batches=kind == "split", even_batches=True
        ),
    )
    dataset: Any = _Stream() if kind == "stream" else TensorDataset(*_data())
    loader: Any = accelerator.prepare(DataLoader(dataset, batch_size=8))
    return [numbers.tolist() for numbers, _ in loader]


@pytest.mark.parametrize("kind", ["map", "stream", "dispatch", "split"])
def test_the_batches_of_one_reader_are_those_of_one_process(kind: str) -> None:
    """No sample is repeated to fill the last batch: there is no other reader to keep in step with."""
    assert run_on_ranks(_read, kind) == [[[*range(8)], [*range(8, 16)], [*range(16, 22)]]] * 2


def _read_along(axes: dict[str, int]) -> list[int]:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    loader: Any = prepare_data_loader(DataLoader(TensorDataset(torch.arange(8)), batch_size=2), torch_device_mesh=mesh)
    return [number for (numbers,) in loader for number in numbers.tolist()]


@pytest.mark.parametrize(
    ("axes", "readers"),
    [
        ({"pp": 2, "dp_shard": 2}, [0, 1, 0, 1]),
        ({"dp_shard": 2, "tp": 2}, [0, 0, 1, 1]),
        ({"dp_replicate": 2, "dp_shard": 2}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_a_loader_for_a_mesh_is_divided_along_the_data_parallel_axes(axes: dict[str, int], readers: list[int]) -> None:
    parts = {2: [[0, 1, 4, 5], [2, 3, 6, 7]], 4: [[0, 1], [2, 3], [4, 5], [6, 7]]}[max(readers) + 1]
    assert run_on_ranks(_read_along, axes, world_size=4) == [parts[reader] for reader in readers]


def _refusal(sizes: dict[str, int]) -> str:
    with pytest.raises((ConfigError, UsageError)) as raised:
        Accelerator(cpu=True, parity="bitwise", parallelism_config=ParallelismConfig(**sizes))  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.parametrize(
    ("axis", "text"),
    [
        (
            "tp",
            "sums the gradients of batch shards across all ranks and does not support 2 replicas",
        ),  # tp_size alone is supported
        *(
            (axis, "parity='bitwise' sums the gradients of batch shards in a fixed order")
            for axis in ("cp", "sp", "pp")
        ),
    ],
)
def test_bitwise_parity_is_refused_where_ranks_share_samples(axis: str, text: str) -> None:
    for refusal in run_on_ranks(_refusal, {"dp_replicate_size": 2, f"{axis}_size": 2}, world_size=4):
        assert text in refusal
        assert "parity='exact'" in refusal
