"""A user's script runs without memory up to its first optimizer step, which can then be traced under other settings."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echelon.base.errors import UsageError
from echelon.plan.capture import capture_script

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

HEAD = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

width, size = int(sys.argv[1]), int(sys.argv[2])
model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
loader = DataLoader(data, batch_size=size, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters())
"""

PLAIN = (
    HEAD
    + """
with torch.no_grad():
    print("before", nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item())
    print(model(data.tensors[0]).argmax(1).numpy().mean(), len(model[0].bias[:5].tolist()))
model.to("cpu")
for x, y in loader:
    loss = nn.CrossEntropyLoss()(model(x), y)
    print(f"{loss.item():.2f}", loss)
    loss.backward()
    optimizer.step()
    open("checkpoint", "w")
"""
)

WITH_ACCELERATOR = (
    HEAD
    + """
from echelon import Accelerator
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
open("checkpoint", "w")
"""
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_plain_script_is_traced_with_weights_larger_than_any_memory(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    before, state = list(sys.argv), torch.get_rng_state()
    captured = capture_script(script(PLAIN), ["1000000", "16"])  # weights of 4 TB
    assert (captured.settings.micro_batch, captured.accumulation) == (16, 1)
    assert [one.tensor.shape for one in captured.model.parameters if one.name == "1.weight"] == [(1_000_000, 1_000_000)]
    trace = captured.trace(captured.settings)
    assert max(one.gradients for one in trace.moments) > 4 * 10**12
    # What the layers of width 10^6 return is kept, and grows with the samples.
    kept = max(one.activations for one in trace.moments)
    assert 2 * 16 * 10**6 * 4 <= kept <= 3 * 16 * 10**6 * 4
    twice = captured.trace(replace(captured.settings, micro_batch=32))
    assert max(one.activations for one in twice.moments) == pytest.approx(2 * kept, rel=1e-3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20  # KiB
    assert not (tmp_path / "checkpoint").exists()
    assert sys.argv == before
    assert torch.equal(torch.get_rng_state(), state)


def test_the_settings_of_an_accelerator_are_found_and_replaced(script: Callable[[str], str], tmp_path: Path) -> None:
    captured = capture_script(script(WITH_ACCELERATOR), ["1000", "8"], read_settings=lambda: "chosen")
    assert captured.settings.mixed_precision == "bf16"
    assert (captured.settings.micro_batch, captured.accumulation, captured.chosen) == (8, 2, "chosen")
    low = captured.trace(captured.settings)
    full = captured.trace(replace(captured.settings, mixed_precision="no"))
    assert max(one.weight_copies for one in low.moments) >= 2 * 1000 * 1000
    assert max(one.weight_copies for one in full.moments) == 0
    assert not (tmp_path / "checkpoint").exists()


def test_a_script_without_a_step_is_refused(script: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="without a step of a torch optimizer: it has ended"):
        capture_script(script(HEAD), ["10", "4"])


def test_an_error_names_the_line_of_the_script(script: Callable[[str], str]) -> None:
    path = script(HEAD + "\nmodel(data.tensors[0]).unique()\n")
    with pytest.raises(UsageError, match=rf"in {path}:{HEAD.count(chr(10)) + 2}: .*"):
        capture_script(path, ["10", "4"])


def test_no_hook_stays_in_the_process(script: Callable[[str], str]) -> None:
    capture_script(script(PLAIN), ["16", "4"])
    assert not torch.nn.modules.module._has_any_global_hook()


def test_two_models_in_a_step_are_refused(script: Callable[[str], str]) -> None:
    path = script(
        HEAD + "\n(model(data.tensors[0]).sum() + model(data.tensors[0]).sum()).backward()\noptimizer.step()\n"
    )
    with pytest.raises(UsageError, match="calls 2 models"):
        capture_script(path, ["10", "4"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("quickstart.py",),
        *((name, "--limit", "256") for name in ("mnist_accelerator.py", "mnist_trainer.py")),
        *((name,) for name in ("gpt2_zero3.py", "llama_nd.py", "ragged_language_model.py")),
        *((name,) for name in ("reviews_accelerator.py", "reviews_trainer.py")),
    ],
    ids=lambda arguments: arguments[0],
)
def test_examples_are_captured(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    captured = capture_script(str(EXAMPLES / arguments[0]), arguments[1:])
    trace = captured.trace(captured.settings)
    assert {one.phase for one in trace.moments} == {"forward", "backward", "optimizer"}
    assert max(one.activations for one in trace.moments) > 0


@pytest.mark.slow
def test_a_script_of_level_1_is_planned(tmp_path: Path) -> None:
    # In a process of its own, because the script keeps its process group until it ends.
    command = ["plan", "--device", "T4", "--gpus", "2", str(EXAMPLES / "mnist_ddp.py"), "--limit", "256"]
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, "FITS: " in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 reads it
def test_an_evaluation_that_selects_by_predictions_is_refused_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"lora.py fails when it runs without memory, in .*lora.py:\d+: Dynamic"):
        capture_script(str(EXAMPLES / "lora.py"), [])
