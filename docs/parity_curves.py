"""The training behind the curves of parity.md: prints the loss on test images after every 96 images or a little more.

Start it by ``echelon launch --cpu --num_processes 3 --parity exact docs/parity_curves.py``.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from mnist_data import mnist


def main() -> None:
    """Train one pass over 3,168 images by batches of 32."""
    accelerator = Accelerator(seed=0)
    images, labels = mnist(False, limit=1000).tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(mnist(True, limit=3168), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen, curve = 0, [(0, _loss(model, images, labels))]
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        seen += len(accelerator.gather_for_metrics(y))
        if accelerator.sync_gradients and seen >= curve[-1][0] + 96:
            curve.append((seen, _loss(model, images, labels)))
    accelerator.print(json.dumps(curve))
    accelerator.end_training()


@torch.no_grad()
def _loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return round(nn.functional.cross_entropy(model(images), labels).item(), 7)


if __name__ == "__main__":
    main()
