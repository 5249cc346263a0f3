"""SyncBatchNorm in recorded runs, which are on the CPU, against BatchNorm of the whole batch in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.verify.recorders.sync_batch_norm import run_sync_batch_norm_on_cpu
from echelon.verify.recording import recording
from echelon.verify.trace import RecordingSettings
from tests.harness import run_on_ranks

SIZES = (3, 5)  # samples of each rank


def _net(momentum: float | None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4, momentum=momentum), nn.GELU(), nn.Flatten(), nn.Linear(8, 1)
    ).double()


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [3 + torch.randn(sum(SIZES), 2, 3, generator=generator, dtype=torch.float64) for _ in range(2)]


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {f"{name}.grad": one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: one.clone() for name, one in {**gradients, **model.state_dict()}.items()}


def _on_rank(folder: str, momentum: float | None) -> list[dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    with recording(Path(folder), RecordingSettings(steps=100), rank=rank) as one:
        run_sync_batch_norm_on_cpu(one)
        model: Any = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(_net(momentum)))
        found = []
        for batch in _batches():
            own = batch.split(SIZES)[rank]
            model.zero_grad()
            outputs = model(own)
            (2 * outputs.square().sum() / sum(SIZES)).backward()  # twice, because DDP averages over the ranks
            found.append({"outputs": outputs.detach(), **_values(model.module)})
        model.eval()
        found.append({"outputs": model(own).detach()})
    with pytest.raises(ValueError, match="GPU modules"):  # torch's own behaviour is restored
        DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(_net(momentum)))
    return found


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_those_of_all_ranks(momentum: float | None, tmp_path: Path) -> None:
    ranks = run_on_ranks(_on_rank, str(tmp_path), momentum)
    model = _net(momentum)
    for update, batch in enumerate(_batches()):
        model.zero_grad()
        outputs = model(batch)
        (outputs.square().sum() / sum(SIZES)).backward()
        expected = _values(model)
        found = torch.cat([one[update]["outputs"] for one in ranks])
        torch.testing.assert_close(found, outputs.detach(), rtol=1e-12, atol=1e-13)  # float64, sums in another order
        for one in ranks:
            for name, value in expected.items():
                torch.testing.assert_close(one[update][name], value, rtol=1e-12, atol=1e-13)
    model.eval()
    expected_outputs = model(_batches()[-1]).detach()
    torch.testing.assert_close(
        torch.cat([one[2]["outputs"] for one in ranks]), expected_outputs, rtol=1e-12, atol=1e-13
    )
