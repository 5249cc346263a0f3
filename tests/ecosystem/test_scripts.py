"""The runner of example scripts (``scripts.py``) records what a script computes, and finds a difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ecosystem.run import PYTHON, ProgramFailedError, Way
from tests.ecosystem.scripts import SCRIPTS, Recorded, judge, record

needs_libraries = pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON} (make ecosystem)")

# The sum of x * (x - 1) * w over a batch has the gradient 2, 18, 50 for the batches [1, 2], [3, 4], [5, 6].
_SCRIPT = """
import json
import sys
from pathlib import Path

import evaluate
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

rate = 0.5 if WRONG and "echelon" in sys.modules else 0.25
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
data = [float(i + 1) for i in range(12 // accelerator.num_processes * accelerator.num_processes)]
loader = DataLoader(data, batch_size=2, shuffle=accelerator.num_processes > 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate), loader)
metric = evaluate.load("accuracy")
for batch in loader:
    batch = batch.float()[:, None]
    accelerator.backward((model(batch) * (batch - 1)).sum())
    optimizer.step()
    optimizer.zero_grad()
    gathered = accelerator.gather_for_metrics(batch.flatten().long())
    metric.add_batch(predictions=gathered, references=gathered)
result = metric.compute()
if accelerator.is_main_process:
    Path("out").mkdir()
    Path("out", "all_results.json").write_text(json.dumps({**result, "train_runtime": torch.rand(()).item()}))
accelerator.end_training()
"""

# A thread of gloo that needs the GIL waits for as long as the main thread keeps it, which makes torch's deadlock likely in each turn.
_FREED = """
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.setswitchinterval(600)
for i in range(10):
    dist.init_process_group("gloo", init_method=f"file://{Path(f'group{i}').resolve()}", rank=int(os.environ["RANK"]), world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    gathered = [torch.empty(4) for _ in range(2)]
    dist.all_gather(gathered, torch.ones(4))
    del gathered, optimizer
    dist.destroy_process_group()
    del model
"""


def _recorded(folder: Path, way: Way, num_processes: int, text: str, timeout_s: float = 300) -> Recorded:
    script, materials = folder / "small.py", folder / "materials"
    script.write_text(text)
    materials.mkdir(exist_ok=True)
    return record(script, [], way, num_processes, materials=materials, timeout_s=timeout_s)


@pytest.mark.soak
@needs_libraries
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_steps_and_results_of_a_script_are_recorded_and_equal(tmp_path: Path, num_processes: int) -> None:
    text = _SCRIPT.replace("WRONG", "False")
    native = _recorded(tmp_path, "native", num_processes, text)
    # In the order of the dataset, also on two processes, where the gradients of the two batches are averaged.
    gradients = [2.0, 18.0, 50.0, 98.0, 162.0, 242.0] if num_processes == 1 else [10.0, 74.0, 202.0]
    assert [step["gradient_norm"] for step in native.values["rank 0"]["steps"]] == pytest.approx(gradients)
    assert native.values["rank 0"]["steps"][-1]["weight_sum"] == pytest.approx(-0.25 * sum(gradients))
    assert native.values["rank 0"]["metrics"] == [{"rows": 12, "accuracy": 1.0}]
    assert native.values["results"] == {"accuracy": 1.0}
    for way in ("launch --as", "torchrun, install()"):
        swapped = _recorded(tmp_path, way, num_processes, text)
        assert "stands in for accelerate" in swapped.output
        outcome = judge(native, swapped, {}, num_processes)
        assert (outcome.listed, outcome.unexpected) == ({}, {})


@pytest.mark.soak
@needs_libraries
def test_a_native_script_ends_though_it_frees_its_model_after_its_process_group(tmp_path: Path) -> None:
    ended = _recorded(tmp_path, "native", 2, _FREED, timeout_s=120)
    assert len(ended.values["rank 0"]["steps"]) == 10


@pytest.mark.soak
@needs_libraries
def test_a_script_that_computes_something_else_on_echelon_differs(tmp_path: Path) -> None:
    text = _SCRIPT.replace("WRONG", "True")
    native, swapped = (_recorded(tmp_path, way, 1, text) for way in ("native", "launch --as"))
    names = {"learning_rate", "weight_norm", "weight_sum"}
    assert set(judge(native, swapped, {}, 1).unexpected) == {f"rank 0.steps.{name}" for name in names}


@pytest.mark.soak
@needs_libraries
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("optimizer.step()", "pass"), "a process made no optimizer step"),
        (lambda text: text + "raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_script_that_fails_or_trains_nothing_is_no_result(
    tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    with pytest.raises(ProgramFailedError, match=message):
        _recorded(tmp_path, "native", 1, change(_SCRIPT.replace("WRONG", "False")))


def test_a_listed_difference_holds_for_its_number_of_processes() -> None:
    native, swapped = (Recorded({"log": [{"loss": loss, "epoch": 1}]}, "") for loss in (0.5, 0.75))
    assert judge(native, swapped, {}, 2).unexpected == {"log.loss": 0.25}
    for different in ({"log.*": "a reason"}, {"2: log.*": "a reason"}):
        outcome = judge(native, swapped, different, 2)
        assert (outcome.listed, outcome.unexpected, outcome.largest) == ({"log.loss": 0.25}, {}, 0.0)
    assert judge(native, swapped, {"1: log.*": "a reason"}, 2).unexpected == {"log.loss": 0.25}


@pytest.mark.parametrize(
    ("native", "swapped", "difference"),
    [(1.0, math.nan, math.inf), (math.nan, 1.0, math.inf), (math.nan, math.nan, 0.0), (4.0, 5.0, 0.25)],
)
def test_a_loss_that_is_not_a_number_equals_only_another(native: float, swapped: float, difference: float) -> None:
    outcome = judge(Recorded({"loss": native}, ""), Recorded({"loss": swapped}, ""), {}, 1)
    assert outcome.unexpected == ({"loss": difference} if difference else {})


def test_what_is_missing_on_echelon_differs() -> None:
    outcome = judge(Recorded({"model.safetensors": {"w": 1.0}}, ""), Recorded({}, ""), {}, 1)
    assert outcome.unexpected == {"model.safetensors.w": math.inf}


def test_the_cases_of_a_library_have_different_names() -> None:
    for scripts in SCRIPTS.values():
        names = [(script.file, script.variant) for script in scripts]
        assert len(names) == len(set(names))
