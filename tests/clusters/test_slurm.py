"""Jobs of a real Slurm, by echelon submit slurm: put back into the queue in the middle, they end with the bits of undisturbed runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.clusters.slurm import Slurm, missing, wait_for

pytestmark = pytest.mark.soak

# As docs/preemption.md writes it; each step is noted with the start that made it.
TRAIN = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from echelon import Accelerator
from echelon.utils import ProjectConfiguration

folder, pace = sys.argv[1], float(sys.argv[2])
torch.set_default_dtype(torch.float64)
project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project, seed=7, parity="exact")
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(16, 1))
x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, batch_size=7, shuffle=True, num_workers=int(sys.argv[3]))
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
accelerator.resume()
for epoch in accelerator.epochs(6):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pace)
        if accelerator.is_main_process:
            with open(folder + ".steps", "a") as file:
                start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
                print(json.dumps([start, accelerator.progress.step, accelerator.num_processes]), file=file)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), folder + ".pt")
"""
STEPS = 6 * 9  # 60 samples in batches of 7


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing():
        pytest.skip(f"NOT RUN on Slurm: there is no {', '.join(missing())} (make clusters)")
    with Slurm(tmp_path_factory.mktemp("slurm") / "site") as found:
        (found.folder / "train.py").write_text(TRAIN)
        yield found


def _submit(slurm: Slurm, name: str, *flags: str, pace: float, workers: int = 0) -> tuple[str, Path]:
    told = slurm.ask(
        *(sys.executable, "-m", "echelon", "submit", "slurm", *flags, "--job_name", name),
        *("--env", "OMP_NUM_THREADS=1", "train.py", name, str(pace), str(workers)),
    )
    job = told.split()[2].rstrip(";")
    return job, slurm.folder / f"{name}-{job}.out"


def _steps(slurm: Slurm, name: str) -> list[list[int]]:
    file = slurm.folder / f"{name}.steps"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _weights(slurm: Slurm, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(slurm.folder / f"{name}.pt", weights_only=True)
    return found


def _same_bits(slurm: Slurm, name: str, other: str) -> bool:
    one, two = _weights(slurm, name), _weights(slurm, other)
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("flags", [["--direct"], []], ids=["two_tasks", "a_launcher"])
def test_a_job_that_is_requeued_in_the_middle_ends_with_the_same_bits(
    slurm: Slurm, flags: list[str], request: pytest.FixtureRequest
) -> None:
    name, flags = request.node.callspec.id, [*flags, "--nproc_per_node", "2"]
    whole, output = _submit(slurm, f"{name}_whole", *flags, pace=0.0)
    slurm.finish(whole, output)
    job, output = _submit(slurm, name, *flags, pace=0.15)
    wait_for("some steps", lambda: len(_steps(slurm, name)) > STEPS // 3)
    slurm.ask("scontrol", "requeue", job)
    text = slurm.finish(job, output)
    assert slurm.state(job)[1] == 1, text
    steps = _steps(slurm, name)
    starts = {start for start, _, _ in steps}
    before = [step for start, step, _ in steps if start == 0]
    assert starts == {0, 1}, text
    assert STEPS // 3 < len(before) < STEPS
    # It went on where it had been asked to end: each step is made once, by two ranks.
    assert [step for _, step, _ in steps] == list(range(1, STEPS + 1)), text
    assert {size for _, _, size in steps} == {2}
    assert _same_bits(slurm, name, f"{name}_whole"), text


def test_a_job_whose_time_is_nearly_over_saves_and_goes_back_by_itself(slurm: Slurm) -> None:
    # With workers of the loaders: Slurm signals them, too.
    whole, output = _submit(slurm, "timed_whole", "--nproc_per_node", "2", pace=0.0, workers=1)
    slurm.finish(whole, output)
    job, output = _submit(slurm, "timed", "--nproc_per_node", "2", pace=0.15, workers=1)
    wait_for("some steps", lambda: len(_steps(slurm, "timed")) > STEPS // 3)
    # What --signal=USR1@120 makes slurmctld do 120 s before the end.
    slurm.ask("scancel", "--signal=USR1", job)
    text = slurm.finish(job, output)
    assert slurm.state(job)[1] == 1, text
    assert "requeueing this job" in text
    assert [step for _, step, _ in _steps(slurm, "timed")] == list(range(1, STEPS + 1)), text
    assert _same_bits(slurm, "timed", "timed_whole")


def test_a_job_that_is_cancelled_does_not_go_back(slurm: Slurm) -> None:
    job, output = _submit(slurm, "cancelled", "--nproc_per_node", "2", pace=0.15)
    wait_for("some steps", lambda: len(_steps(slurm, "cancelled")) > 3)
    slurm.ask("scancel", job)
    wait_for("its end", lambda: slurm.state(job)[0] == "CANCELLED" and not slurm.ask("squeue", "-h", "-j", job))
    assert slurm.state(job) == ("CANCELLED", 0), output.read_text()
    assert "all ranks stopped at the same step" in output.read_text()
    assert "goes back" not in output.read_text()


def test_launchers_on_two_machines_find_each_other_and_go_on(slurm: Slurm) -> None:
    whole, output = _submit(slurm, "two_whole", "--nproc_per_node", "2", pace=0.0)
    slurm.finish(whole, output)
    job, output = _submit(slurm, "two", "--nodes", "2", "--nproc_per_node", "1", pace=0.15)
    wait_for("some steps", lambda: len(_steps(slurm, "two")) > STEPS // 3)
    slurm.ask("scancel", "--signal=USR1", job)
    text = slurm.finish(job, output)
    assert slurm.state(job)[1] == 1, text
    assert [step for _, step, _ in _steps(slurm, "two")] == list(range(1, STEPS + 1)), text
    assert {size for _, _, size in _steps(slurm, "two")} == {2}
    # Two ranks on one machine or on two: the same sums.
    assert _same_bits(slurm, "two", "two_whole")
    assert list(slurm.folder.glob(".token*")) == []
