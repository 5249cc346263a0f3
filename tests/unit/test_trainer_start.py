"""What a Trainer on one process imports: not torch's compiler nor its sharding, each longer to import than all of echelon."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from echelon.trainer.optim.optimizers import without_compiler

PROGRAM = """
import sys
import torch
from echelon import Trainer, TrainingArguments

class Squares(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        x, y = inputs
        loss = (model(x) - y).square().mean()
        return (loss, x) if return_outputs else loss

def trainer():
    torch.manual_seed(0)
    args = TrainingArguments(
        sys.argv[1], num_train_epochs=4, learning_rate=0.1, max_grad_norm=0.5, report_to="none", use_cpu=True, disable_tqdm=True,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
    )
    data = [(torch.arange(4.0), torch.ones(2))]
    return Squares(torch.nn.Linear(4, 2), args, train_dataset=data, eval_dataset=data)

trainer().train()
again = trainer()
again.train(resume_from_checkpoint=sys.argv[1] + "/checkpoint-2")
again.save_model(sys.argv[1])
not_needed = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "yaml")
print("imported:", [name for name in not_needed if name in sys.modules])
"""


@pytest.mark.slow
def test_one_process_trains_saves_and_resumes_without_torchs_compiler_and_sharding(tmp_path: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []", done.stdout

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    for _ in range(4):
        (model(torch.arange(4.0)[None]) - torch.ones(1, 2)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    trained = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not imported the compiler, as far as can be seen; undo it before anything imports it again."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor]
)
def test_optimizers_step_as_torchs_own_and_are_taken_for_them(
    kind: type[torch.optim.Optimizer], unloaded: pytest.MonkeyPatch
) -> None:
    made = without_compiler(kind)
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    models[1].load_state_dict(models[0].state_dict())
    own = made(models[0].parameters(), lr=0.1)
    steps = []
    own.register_step_post_hook(lambda *_: steps.append(1))

    def train(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            model(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(models[0], own)
    own.load_state_dict(own.state_dict())
    train(models[0], own)
    assert "torch._dynamo" not in sys.modules
    assert len(steps) == 6
    assert isinstance(own, kind)
    assert (made.__name__, made.__module__) == (kind.__name__, kind.__module__)
    unloaded.undo()
    assert [type(copied) for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own)))] == [kind, kind]
    plain = kind(models[1].parameters(), lr=0.1)  # type: ignore[call-arg]
    train(models[1], plain)
    train(models[1], plain)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))


def test_what_others_put_around_a_step_stays(unloaded: pytest.MonkeyPatch) -> None:
    calls = []
    plain: Any = torch.optim.SGD.step

    @functools.wraps(plain)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", counted)
        parameter = nn.Parameter(torch.ones(1))
        optimizer = without_compiler(torch.optim.SGD)([parameter], lr=0.5)  # type: ignore[call-arg]
        unloaded.undo()
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert calls == [1]
    assert parameter.item() == 0.5
