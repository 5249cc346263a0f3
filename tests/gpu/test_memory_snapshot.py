"""torch's memory snapshot of a training on a GPU."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from echelon.trainer import Trainer
from tests.trainer_models import Net, arguments, net_data

pytestmark = pytest.mark.gpu


def test_the_snapshot_holds_allocations_with_their_stacks(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), use_cpu=False, memory_snapshot=str(tmp_path / "snapshots"))
    Trainer(Net(), args, train_dataset=net_data(8)).train()
    snapshot = pickle.loads((tmp_path / "snapshots" / "memory-rank0.pickle").read_bytes())
    events = [event for trace in snapshot["device_traces"] for event in trace]
    assert any(event["action"] == "alloc" and event["frames"] for event in events)
