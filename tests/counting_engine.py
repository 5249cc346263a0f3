"""A third-party engine for tests: ddp with counters of its calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from echelon.base.capabilities import Capabilities
from echelon.engines.ddp import DDPEngine
from echelon.engines.delegating_engine import DelegatingEngine
from echelon.world.world import World


class CountingEngine(DelegatingEngine):
    def __init__(self, world: World, *, scaler: torch.amp.GradScaler | None = None) -> None:
        super().__init__(DDPEngine(world, scaler=scaler))
        self.num_steps = 0

    @classmethod
    def from_options(
        cls, world: World, *, scaler: torch.amp.GradScaler | None, options: Mapping[str, Any]
    ) -> CountingEngine:
        return cls(world, scaler=scaler)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, name="counting")

    def step(self, optimizer: Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        is_taken = super().step(optimizer, closure=closure, unsynced=unsynced)
        self.num_steps += is_taken
        return is_taken


@contextmanager
def installed() -> Iterator[None]:
    """Make the engine available in the block as that of an installed package, through the metadata that an installer writes."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        metadata = Path(folder, "counting-1.0.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[echelon.engines]\ncounting = {__name__}:CountingEngine\n")
        patch.setattr(sys, "path", [folder, *sys.path])
        yield
