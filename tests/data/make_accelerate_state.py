"""Write tests/data/accelerate_state: run by a Python that has accelerate 1.15, when the fixture is to be made anew.

``.venv-peers/bin/python tests/data/make_accelerate_state.py``; ``tests/ranks/accelerator/test_accelerate_layout.py`` knows what it holds.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "accelerate_state")


class Counter:
    """Something registered."""

    def __init__(self) -> None:
        self.count = 3

    def state_dict(self) -> dict:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        """Take the count."""
        self.count = state["count"]


accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
with torch.no_grad():
    model.weight.copy_(torch.tensor([[0.5, -0.25]]))
    model.bias.zero_()
optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
accelerator.register_for_checkpointing(Counter())
for _ in range(2):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
torch.manual_seed(11)
np.random.seed(12)
random.seed(13)
accelerator.save_state(folder)
expected = {
    "weight": model.weight.tolist(),
    "bias": model.bias.tolist(),
    "exp_avg": optimizer.state_dict()["state"][0]["exp_avg"].tolist(),
    "lr": scheduler.get_last_lr(),
    "step": accelerator.step,
    "drawn": [torch.rand(()).item(), float(np.random.rand()), random.random()],
}
(folder / "expected.json").write_text(json.dumps(expected) + "\n")
