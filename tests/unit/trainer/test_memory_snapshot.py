"""``memory_snapshot``: what torch is asked for, and that other devices are refused. The file itself needs a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from echelon.base.errors import ConfigError
from echelon.trainer import Trainer
from echelon.trainer.features.memory_snapshot import memory_snapshot
from tests.trainer_models import Net, arguments, net_data


def test_the_snapshot_is_written_after_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda file: calls.append(file))
    accelerator: Any = SimpleNamespace(device=torch.device("cuda", 0), process_index=3)
    with pytest.raises(torch.OutOfMemoryError), memory_snapshot(str(tmp_path / "new"), accelerator):
        raise torch.OutOfMemoryError
    assert calls == [{"max_entries": 100_000}, str(tmp_path / "new" / "memory-rank3.pickle"), {"enabled": None}]
    assert (tmp_path / "new").is_dir()


def test_other_devices_are_refused(tmp_path: Path) -> None:
    args = arguments(str(tmp_path), memory_snapshot=str(tmp_path / "snapshots"))
    with pytest.raises(ConfigError, match="memory_snapshot needs a CUDA or ROCm device, but this rank uses cpu"):
        Trainer(Net(), args, train_dataset=net_data(8)).train()
