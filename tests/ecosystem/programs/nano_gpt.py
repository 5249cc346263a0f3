"""Trains a tiny GPT like nanoGPT's ``train.py``: torchrun's variables, DistributedDataParallel, and ``require_backward_grad_sync``.

Nothing here names a launcher or a library other than torch. Rank 0 prints the losses, gradient norms and weights.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, BLOCK, WIDTH, HEADS, LAYERS = 32, 16, 32, 4, 2
BATCH, ACCUMULATION, STEPS = 4, 4, 8
LEARNING_RATE, WARMUP = 1e-2, 2


class Block(nn.Module):
    """Causal self-attention and an MLP, with the norm before each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = (
            part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norms[0](x)).split(WIDTH, 2)
        )
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(rows, length, WIDTH)
        x = x + self.out(attended)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A GPT whose head is tied to its embedding; ``forward`` returns the logits and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        logits = self.head(self.blocks(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    distributed = int(os.environ.get("RANK", -1)) != -1
    rank, world_size, accumulation = 0, 1, ACCUMULATION
    if distributed:
        init_process_group(backend="gloo")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert 0 <= int(os.environ["LOCAL_RANK"]) < world_size
        assert accumulation % world_size == 0
        accumulation //= world_size
    torch.manual_seed(
        1337 + rank
    )  # each rank draws batches of its own; DistributedDataParallel sends the weights of rank 0
    text = torch.randint(VOCABULARY, (512,), generator=torch.Generator().manual_seed(0))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - BLOCK, (BATCH,)).tolist()
        return torch.stack([text[i : i + BLOCK] for i in starts]), torch.stack(
            [text[i + 1 : i + 1 + BLOCK] for i in starts]
        )

    raw = Model()
    decayed = [p for p in raw.parameters() if p.dim() >= 2]
    others = [p for p in raw.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    model: Any = DistributedDataParallel(raw) if distributed else raw
    found: dict[str, list[float]] = {"loss": [], "gradient_norm": []}
    inputs, targets = batch()
    for step in range(STEPS):
        rate = LEARNING_RATE * min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros(())
        for micro_step in range(accumulation):
            if distributed:
                model.require_backward_grad_sync = micro_step == accumulation - 1
            _, loss = model(inputs, targets)
            loss = loss / accumulation
            inputs, targets = batch()
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if distributed:
            all_reduce(total)
        found["loss"].append(float(total) / world_size)
        found["gradient_norm"].append(float(norm))
    if rank == 0:
        torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")
        saved = torch.load("ckpt.pt", weights_only=True)
        weights = {name: float(value.double().norm()) for name, value in saved["model"].items()}
        print("RESULT " + json.dumps({**found, "weights": weights}))
    if distributed:
        destroy_process_group()


if __name__ == "__main__":
    main()
