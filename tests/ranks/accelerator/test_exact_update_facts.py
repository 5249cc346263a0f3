"""What was measured to go wrong elsewhere, and is right here under ``parity="exact"``: the reference is a plain loop.

All ranks drop the same units (M4), metrics of a stream count samples twice (M5). Elsewhere: short windows (M1) and unequal
items (M2) in test_accelerator.py and test_exact_update.py, a schedule that advances once for each process (M3) in
test_scheduler.py, a resume on another number of processes (M11) in test_epochs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration, set_seed
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings
from tests.reference import NumberStream

# ---- M4: random streams ----------------------------------------------------------------------------------------------


def _masks(seeding: str, seed: int) -> list[list[float]]:
    """Return the units that dropout kept in each batch of two epochs."""
    set_seed(seed)
    accelerator = Accelerator(parity="exact")
    _model, loader = accelerator.prepare(nn.Linear(4, 4), DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4))
    if seeding == "by rank":
        set_seed(seed, device_specific=True)
    masks = []
    for _ in range(2):
        if seeding == "in each epoch":
            set_seed(seed)
        masks += [nn.functional.dropout(torch.ones(40)).tolist() for _ in loader]
    return masks


def _plain_masks(seed: int, *, then: int | None = None) -> list[list[float]]:
    set_seed(seed)
    nn.Linear(4, 4)
    if then is not None:
        set_seed(then)
    loader = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4)
    return [nn.functional.dropout(torch.ones(40)).tolist() for _ in range(2) for _ in loader]


def test_m4_dropout_differs_between_ranks_and_comes_from_one_seed() -> None:
    found = run_on_ranks(_masks, "once", 0, world_size=4)
    assert len({str(mask) for masks in found for mask in masks}) == 4 * 6
    assert run_on_ranks(_masks, "once", 0, world_size=4) == found
    assert found[0] == _plain_masks(0)
    # Rank r has the same stream in a larger run, and another seed gives another one.
    assert run_on_ranks(_masks, "once", 0) == found[:2]
    other = run_on_ranks(_masks, "once", 1)
    assert not any(mine == theirs for mine, theirs in zip(other, found))


def test_m4_a_seed_set_in_each_epoch_still_differs_between_ranks() -> None:
    for masks in zip(*run_on_ranks(_masks, "in each epoch", 5, world_size=3)):
        assert len({str(mask) for mask in masks}) == 3


def test_m4_ranks_seeded_by_the_user_keep_their_streams() -> None:
    assert run_on_ranks(_masks, "by rank", 7) == [_plain_masks(7, then=7), _plain_masks(7, then=8)]


# ---- M5: metrics of a stream -----------------------------------------------------------------------------------------


def _gathered(parity: str, n: int) -> list[int]:
    accelerator = Accelerator(parity=parity, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(NumberStream(n), batch_size=4))
    with torch.no_grad():
        return [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]


@pytest.mark.parametrize("parity", ["exact", "off"])
def test_m5_metrics_of_a_stream_count_each_sample_once(parity: str) -> None:
    for n in (7, 10, 13):
        assert run_on_ranks(_gathered, parity, n) == [list(range(n))] * 2


# ---- BatchNorm -------------------------------------------------------------------------------------------------------


class _Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(x))
        return found


def _normed(kind: str, n: int, max_micro: int | None) -> tuple[list[str], str | list[torch.Tensor]]:
    """Train two epochs; return the warnings, and the weights or the error."""
    torch.manual_seed(2)
    accelerator = Accelerator(parity="exact", max_micro_batch_size=max_micro)
    norm = (nn.SyncBatchNorm if kind == "sync" else nn.BatchNorm1d)(4)
    model: Any = _Normed(norm).requires_grad_(kind != "sync")  # DDP supports SyncBatchNorm only on accelerators
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(4.0 * n).reshape(n, 4) / n)
    with all_warnings() as caught:
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
        result: str | list[torch.Tensor] = []
        try:
            for _ in range(2):
                model.train()
                if kind == "eval":
                    norm.eval()
                for (x,) in loader:
                    if kind == "sync":
                        continue  # and so does its forward pass
                    with accelerator.accumulate(model):
                        accelerator.backward(model(x).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
            result = [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]
        except UsageError as error:
            result = str(error)
    return [str(w.message) for w in caught if w.category is EchelonWarning], result


def _all_normed(cases: list[tuple[str, int, int | None]]) -> list[Any]:
    return [_normed(*case) for case in cases]


def test_batch_norm_warns_once_if_the_update_depends_on_the_split() -> None:
    cases: list[tuple[str, int, int | None]] = [
        ("train", 8, None),
        ("eval", 8, None),
        ("sync", 8, None),
        ("sync", 8, 1),
    ]
    first, second = run_on_ranks(_all_normed, cases)
    assert [len(warned) for warned, _ in first] == [1, 0, 0, 1]
    assert [len(warned) for warned, _ in second] == [0] * 4  # rank zero warns for all ranks
    (text,) = first[0][0]
    assert all(word in text for word in ("1 BatchNorm layer", "SyncBatchNorm", "GroupNorm"))
    assert [len(_normed(*case)[0]) for case in [("train", 8, None), ("train", 8, 2), ("eval", 8, 2)]] == [0, 1, 0]


def test_batch_norm_in_training_rejects_a_rank_without_samples() -> None:
    first, second = run_on_ranks(_all_normed, [("train", 5, None), ("eval", 5, None)])
    for refused, allowed in (first, second):
        assert "an update of 1 samples leaves rank(s) 1 without samples" in refused[1]
        assert "GroupNorm" in refused[1]
        # Fixed statistics do not depend on the number of ranks, so the results are those of one process.
        torch.testing.assert_close(allowed[1], _normed("eval", 5, None)[1], rtol=1e-5, atol=1e-6)
