"""``parity="exact"`` against a plain loop over whole batches in one process."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import Accelerator, DataLoaderConfiguration
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks

_SEED = 11
_EPOCHS = 2


@dataclass(frozen=True)
class _Case:
    n: int
    batch_size: int
    accumulation: int
    max_micro: int | None
    optimizer: str
    losses: str  # samples | tokens | two (two losses in a micro-step)
    drop_last: bool = False


def _cases(seed: int, count: int) -> list[_Case]:
    draw = random.Random(seed)
    return [
        _Case(
            n=draw.randint(1, 40),
            batch_size=draw.randint(1, 13),
            accumulation=draw.choice([1, 1, 2, 3]),
            max_micro=draw.choice([None, None, 1, 2]),
            optimizer=draw.choice(["sgd", "sgd", "adamw"]),
            losses=draw.choice(["samples", "tokens", "two"]),
            drop_last=draw.random() < 0.2,
        )
        for _ in range(count)
    ]


class _Ragged(Dataset[Any]):
    """Sequences of different lengths; some are masked altogether."""

    def __init__(self, n: int) -> None:
        g = torch.Generator().manual_seed(n)
        self.x = torch.randn(n, 6, 5, generator=g, dtype=torch.float64)
        self.y = torch.randn(n, 6, generator=g, dtype=torch.float64)
        lengths = torch.randint(0, 7, (n,), generator=g)
        self.mask = (torch.arange(6)[None] < lengths[:, None]).double()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return i, self.x[i], self.y[i], self.mask[i]


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def _optimizer(case: _Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _losses(case: _Case, model: Any, batch: Any) -> tuple[list[torch.Tensor], float]:
    """Return mean losses, and the number of items that each is a mean over."""
    _, x, y, mask = batch
    error = (model(x).squeeze(-1) - y) ** 2
    if case.losses == "samples":
        return [error.mean(1).mean()], len(x)
    if case.losses == "tokens":
        return [(error * mask).sum() / mask.sum()], float(mask.sum())
    return [error.mean(), (model(x * 2).squeeze(-1) * 0.1).mean()], len(x)


def _plain(case: _Case) -> dict[str, Any]:
    model, data = _model(), _Ragged(case.n)
    optimizer = _optimizer(case, model)
    found: dict[str, Any] = {"norms": [], "losses": [], "gradients": [], "order": []}
    for epoch in range(_EPOCHS):
        order = torch.randperm(case.n, generator=torch.Generator().manual_seed(_SEED + epoch))
        for indices in order.split(case.batch_size):
            if case.drop_last and len(indices) < case.batch_size:
                continue
            losses, items = _losses(case, model, (indices, data.x[indices], data.y[indices], data.mask[indices]))
            loss = sum(losses, torch.zeros((), dtype=torch.float64))
            if items:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            found["order"].append(sorted(indices.tolist()))
            found["losses"].append(float(loss.detach()) if items else 0.0)
            found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            found["gradients"].append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
    found["weights"] = [p.detach().clone() for p in model.parameters()]
    return found


def _exact(case: _Case) -> dict[str, Any]:
    accelerator = Accelerator(
        parity="exact",
        gradient_accumulation_steps=case.accumulation,
        max_micro_batch_size=case.max_micro,
        dataloader_config=DataLoaderConfiguration(data_seed=_SEED),
    )
    model = _model()
    loader: Any = DataLoader(_Ragged(case.n), batch_size=case.batch_size, shuffle=True, drop_last=case.drop_last)
    model, optimizer, loader = accelerator.prepare(model, _optimizer(case, model), loader)
    found: dict[str, Any] = {"norms": [], "losses": [], "gradients": [], "order": []}
    seen: list[int] = []
    for _ in range(_EPOCHS):
        steps = 0
        for batch in loader:
            steps += 1
            with accelerator.accumulate(model):
                losses, items = _losses(case, model, batch)
                for loss in losses:
                    accelerator.backward(loss, num_items=items if case.losses == "tokens" else None)
                seen += accelerator.gather_for_metrics(batch[0]).tolist()
                if accelerator.sync_gradients:
                    found["order"].append(sorted(seen))
                    seen = []
                    total = accelerator.update_loss() if case.losses != "tokens" or accelerator._window.total else 0.0
                    found["losses"].append(total)
                    found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
                    found["gradients"].append([p.grad.clone() for p in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
        assert steps == len(loader), (steps, len(loader), case)
    found["weights"] = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
    found["progress"] = accelerator.progress.to_json()
    return found


def _exact_all(cases: list[_Case]) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        # DDP reduces in one of two backward passes only; the step guard does the rest, and says that it is slower.
        warnings.filterwarnings(
            "ignore", message="the last backward pass was not synchronized", category=EchelonWarning
        )
        return [_exact(case) for case in cases]


@pytest.mark.parametrize("count", [7, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_update_is_that_of_the_whole_batch_in_one_process(world_size: int, count: int) -> None:
    # Sums in another order: 1e-12 relative (seen: 3e-15). Adam divides by the gradient's size, which turns the noise of
    # a gradient that is nearly zero into a visible step: 1e-9 for its weights.
    cases = _cases(seed=world_size, count=count)
    for rank, results in enumerate(run_on_ranks(_exact_all, cases, world_size=world_size, timeout=20 * count)):
        for case, found in zip(cases, results):
            expected = _plain(case)
            assert found["order"] == expected["order"], (rank, case)
            tolerance = 1e-9 if case.optimizer == "adamw" else 1e-12
            for name in ("losses", "norms", "gradients", "weights"):
                torch.testing.assert_close(
                    found[name],
                    expected[name],
                    rtol=tolerance,
                    atol=1e-14,
                    msg=lambda m, n=name, c=case: f"{n} {c} {m}",
                )


class _Noisy(Dataset[Any]):
    """A dataset that augments by random draws, and notes what is read."""

    def __init__(self, n: int) -> None:
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> torch.Tensor:
        self.read.append(i)
        return self.x[i] + 0.1 * torch.randn(4) + random.random()


def _train_from(
    folder: Path | None, num_workers: int, *, accumulation: int, dropout: float, save_to: Path | None = None
) -> tuple[list[torch.Tensor], list[int], int]:
    """Train up to 3 epochs, from ``folder`` on. Returns the weights, what was read, and the updates of the whole run."""
    torch.manual_seed(7)
    accelerator = Accelerator(parity="exact", gradient_accumulation_steps=accumulation)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = _Noisy(11)
    loader: Any = DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if folder is not None:
        accelerator.load_state(folder)
    steps = 0
    for _ in range(loader.iteration, 3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.double()).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if save_to is not None:  # in the middle of an update, too
                accelerator.save_state(save_to / f"{steps}")
    return (
        [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()],
        data.read,
        accelerator.progress.step,
    )


def _resume_everywhere(root: Path, num_workers: int) -> tuple[dict[int, bool], dict[int, list[int]], int]:
    whole, _, updates = _train_from(None, num_workers, accumulation=2, dropout=0.5, save_to=root)
    same, read = {}, {}
    for folder in root.iterdir():
        weights, seen, in_all = _train_from(folder, num_workers, accumulation=2, dropout=0.5)
        same[int(folder.name)] = all(map(torch.equal, weights, whole)) and in_all == updates
        read[int(folder.name)] = seen
    return same, read, updates


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), pytest.param(1, 2, marks=pytest.mark.soak)])
def test_a_run_stopped_at_any_step_goes_on_bit_for_bit(tmp_path: Path, world_size: int, num_workers: int) -> None:
    results = run_on_ranks(_resume_everywhere, tmp_path, num_workers, world_size=world_size, timeout=180)
    for same, _, updates in results:
        assert updates == 9
        assert same == dict.fromkeys(range(1, 19), True)  # 9 updates of 2 micro-steps
    if num_workers == 0:  # workers read in processes of their own
        for step in range(1, 19):
            done = step // 2  # updates of 4, 4 and 3 samples: nothing before the place is read again
            left = 33 - [0, 4, 8][done % 3] - done // 3 * 11
            lent = (3 - done // 3) * (world_size - 1)  # an epoch's last update has 3 samples for 2 x 2 micro-batches
            assert sum(len(read[step]) for _, read, _ in results) == left + lent


def _part(source: Path, target: Path, stop_after: int) -> tuple[list[torch.Tensor], list[int]]:
    """Go on from ``source`` for some updates, save to ``target``."""
    torch.manual_seed(7)
    accelerator = Accelerator(parity="exact", max_micro_batch_size=2)
    model: Any = nn.Linear(4, 3).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = _Noisy(29)
    loader: Any = DataLoader(data, batch_size=6, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if source.exists():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* has random states of . processes", category=EchelonWarning)
            accelerator.load_state(source)
    updates = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.double()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        updates += accelerator.sync_gradients
        if updates == stop_after:
            break
    accelerator.save_state(target)
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()], data.read


def test_the_number_of_processes_may_change_within_an_epoch(tmp_path: Path) -> None:
    (expected, read_by_one), *_ = run_on_ranks(_part, tmp_path / "none", tmp_path / "one", 99, world_size=1)
    read: list[int] = []
    for number, (world_size, updates) in enumerate([(1, 1), (2, 2), (3, 1), (1, 99)]):
        source, target = tmp_path / f"part{number - 1}", tmp_path / f"part{number}"
        results = run_on_ranks(_part, source, target, updates, world_size=world_size)
        read += [index for _, seen in results for index in seen]
        weights = results[0][0]
    # One batch is read ahead of the loop, so a stopped part has read some of the next update.
    assert set(read) == set(read_by_one) == set(range(29))
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)
