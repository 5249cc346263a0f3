"""Checkpoints are exported to accelerate and transformers, loaded and saved by them, and imported again."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon import Accelerator
from echelon.cli.main import _run

# The program that both sides train, with the parameter groups of transformers' Trainer (with and without weight decay).
OBJECTS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, labels=None):
        out = self.second(self.first(x).tanh())
        return out.square().mean() if labels is None else {"loss": (out - labels).square().mean(), "logits": out}

def objects(seed):
    torch.manual_seed(seed)
    model = Model()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

def train(model, optimizer, schedule, steps, backward=torch.Tensor.backward):
    for step in steps:
        backward(model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

def told(model, optimizer, schedule):
    state = optimizer.state_dict()["state"]
    return {
        "weights": {n: t.tolist() for n, t in model.state_dict().items()},
        "moments": {str(n): {k: t.tolist() for k, t in entries.items()} for n, entries in state.items()},
        "lr": schedule.get_last_lr(),
    }
"""

PROGRAM = (
    OBJECTS
    + """
import json, random, sys
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, TrainingArguments

here = sys.argv[1]
result = {}
accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
prepared = accelerator.prepare(*objects(9))
accelerator.load_state(f"{here}/for_accelerate")
result["random"] = [random.random(), torch.rand(()).item()]
result["accelerate"] = told(*prepared)
train(*prepared, range(3, 5), accelerator.backward)
result["after"] = told(*prepared)
accelerator.save_state(f"{here}/of_accelerate")

class Tell(TrainerCallback):
    def on_train_begin(self, args, state, control, model, optimizer, lr_scheduler, **rest):
        result["transformers"] = {**told(model, optimizer, lr_scheduler), "step": state.global_step}

data = [{"x": torch.randn(4), "labels": torch.zeros(2)} for _ in range(8)]
arguments = TrainingArguments(
    f"{here}/trainer", use_cpu=True, max_steps=4, per_device_train_batch_size=2, report_to=[], save_steps=500,
    disable_tqdm=True, weight_decay=0.1, learning_rate=0.05,
)
model, optimizer, schedule = objects(9)
trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule), callbacks=[Tell()])
trainer.train(resume_from_checkpoint=f"{here}/for_transformers")
result["resumed"] = told(model, optimizer, schedule)
print("RESULT", json.dumps(result))
"""
)


def _objects() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(OBJECTS, scope)
    return scope


def test_checkpoints_survive_a_round_trip_through_the_peers(tmp_path: Path, peers: Path) -> None:
    ours = _objects()
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    prepared = accelerator.prepare(*ours["objects"](0))
    ours["train"](*prepared, range(3), accelerator.backward)
    torch.manual_seed(4)
    accelerator.save_state(str(tmp_path / "own"))
    for peer in ("accelerate", "transformers"):
        argv = ["checkpoint", "export", str(tmp_path / "own"), str(tmp_path / f"for_{peer}"), "--format", peer]
        assert _run(argv) == 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(peers), "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("RESULT ")[1])

    plain = ours["objects"](0)
    ours["train"](*plain, range(3))
    at_save = ours["told"](*plain)
    torch.manual_seed(4)
    assert found["random"][1] == torch.rand(()).item()
    assert found["accelerate"] == at_save
    assert found["transformers"] == {**at_save, "step": 3}
    ours["train"](*plain, range(3, 5))
    assert found["after"] == ours["told"](*plain)

    names = tmp_path / "names.txt"
    named = list(plain[0].named_parameters())
    order = [n for n, _ in named if not n.endswith("bias")] + [n for n, _ in named if n.endswith("bias")]
    names.write_text("\n".join(order))
    sources = {"of_accelerate": found["after"], "trainer/checkpoint-4": found["resumed"]}
    for i, (source, expected) in enumerate(sources.items()):
        argv = ["checkpoint", "import", str(tmp_path / source), str(tmp_path / f"back{i}"), "--parameters", str(names)]
        assert _run(argv) == 0
        accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        again: tuple[nn.Module, Any, Any] = accelerator.prepare(*ours["objects"](7))
        accelerator.load_state(str(tmp_path / f"back{i}"))
        assert ours["told"](*again) == expected
    assert accelerator.progress.step == 4
