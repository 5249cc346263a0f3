"""A run whose whole state says how often it was trained, for tests of its checkpoints in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon import Accelerator
from echelon.utils import ProjectConfiguration


class Run:
    """An Accelerator with a model whose weight, momentum and registered object say how often it was trained."""

    def __init__(
        self, project: Path | str | None, layout: str = "echelon", *, named: bool = True, **options: Any
    ) -> None:
        config = ProjectConfiguration(
            project,
            automatic_checkpoint_naming=named,
            checkpoint_format=layout,  # type: ignore[arg-type]
            **options,
        )
        self.accelerator = Accelerator(cpu=True, project_config=config)
        model, self.marker = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.accelerator.register_for_checkpointing(self.marker)
        self.train_to(0.0)

    def train_to(self, value: float) -> Run:
        parameter = self.model.weight
        with torch.no_grad():
            parameter.fill_(value)
            self.marker.weight.fill_(value)
        self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
        return self

    @property
    def value(self) -> float:
        parameter = self.model.weight
        found = {parameter.item(), self.marker.weight.item(), self.optimizer.state[parameter]["momentum_buffer"].item()}
        assert len(found) == 1, f"a mixture: {found}"
        return found.pop()
