"""A run leaves a folder that says what ran, how it ended, and where its time went; without recording, it leaves nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon.report.run_folder import read_run
from echelon.status import run_files
from echelon.status.step_records import read_step_file
from tests.launch.conftest import Command

RECORD = {"ECHELON_NO_RECORD": ""}


@pytest.mark.parametrize(
    ("flags", "variable"),
    [
        pytest.param(["--no_record"], "", marks=pytest.mark.soak),
        pytest.param([], "1", marks=pytest.mark.soak),
        (["--no_record", "--log_dir", "logs"], ""),
    ],
)
def test_nothing_is_recorded_if_the_user_does_not_want_it(flags: list[str], variable: str, command: Command) -> None:
    result = command.launch(*flags, "--no_python", "true", ECHELON_NO_RECORD=variable)
    assert result.code == 0, result.err
    assert not (command.directory / "echelon-runs").exists()
    assert not list(command.directory.rglob("run.json"))


@pytest.mark.soak
def test_a_folder_that_cannot_be_created_is_one_warning(command: Command) -> None:
    (command.directory / "echelon-runs").write_text("a file")
    result = command.launch("--num_processes=2", "--no_python", "sh", "-c", "echo ran", **RECORD)
    assert (result.code, result.out) == (0, "ran\nran\n")
    warnings = [line for line in result.err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "the run is not recorded, because its folder" in warnings[0]
    assert "(--log_dir DIR chooses another one, --no_record none)" in warnings[0]


@pytest.mark.parametrize(
    ("number", "outcome", "code"),
    [
        pytest.param("SIGINT", "interrupted", 130, marks=pytest.mark.soak),
        pytest.param("SIGKILL", "running", None, marks=pytest.mark.soak),
    ],
)
def test_a_stopped_run_says_so(number: str, outcome: str, code: int | None, command: Command) -> None:
    launcher = command.start_launch("--no_python", "sh", "-c", "echo ready; sleep 60", **RECORD)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    (folder,) = (command.directory / "echelon-runs").iterdir()
    command.wait_for(lambda: run_files.read_info(folder)["board"] is not None, "the board")
    info = run_files.read_info(folder)
    assert Path(info["board"]).is_file()
    assert read_run(folder).outcome == "running"
    launcher.send_signal(signal.Signals[number])
    launcher.wait(30)
    info = run_files.read_info(folder)
    assert (info["outcome"], info["exit_code"]) == (outcome, code)
    assert read_run(folder).outcome == ("ended without a record" if number == "SIGKILL" else outcome)


# Saves after every fourth step; the attempt n is killed during step KILLS[n].
KILLED = """
import os, signal, sys, time
import torch
from torch import nn
from echelon import Accelerator

class Count:
    step = 0
    def state_dict(self): return {"step": self.step}
    def load_state_dict(self, state): self.step = state["step"]

kills, num_steps, pause = [*map(int, sys.argv[1].split(","))], int(sys.argv[2]), float(sys.argv[3])
attempt, accelerator, count = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Accelerator(cpu=True), Count()
rank = accelerator.process_index
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
accelerator.register_for_checkpointing(count)
if os.path.exists("saved"):
    accelerator.load_state("saved")
with open(f"losses_{rank}.txt", "a") as file:
    while count.step < num_steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * count.step + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        if attempt < len(kills) and count.step + 1 == kills[attempt] and rank == accelerator.num_processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        count.step += 1
        print(count.step, loss.item().hex(), file=file, flush=True)
        time.sleep(pause)
        if count.step % 4 == 0:
            accelerator.save_state("saved")
torch.save(accelerator.unwrap_model(model).state_dict(), f"weights_{rank}.pt")
"""


def _losses(folder: Path, rank: int) -> dict[int, str]:
    lines = [line.split() for line in (folder / f"losses_{rank}.txt").read_text().splitlines()]
    losses = {int(step): value for step, value in lines}
    assert [losses[int(step)] for step, _ in lines] == [
        value for _, value in lines
    ]  # repeated steps repeat their losses
    return losses


def _check_killed_run(command: Command, kills: list[int], num_steps: int, num_processes: int, wall_s: float) -> Path:
    """Check the record of a run of KILLED, and return its folder."""
    (folder,) = (command.directory / "echelon-runs").iterdir()
    run = read_run(folder)
    assert (run.outcome, run.facts["num_restarts"]) == ("succeeded", len(kills))
    goodput = run.goodput
    assert goodput is not None
    assert sum(goodput["parts"].values()) == pytest.approx(goodput["wall_s"], rel=0.005)
    assert goodput["wall_s"] == pytest.approx(run.facts["ended"] - run.facts["began"], rel=0.005, abs=0.1)
    # The interpreter has started before the clock, and ends after it.
    assert goodput["wall_s"] == pytest.approx(wall_s, rel=0.005, abs=1.0)
    kinds = [(event["kind"], event["attempt"]) for event in run.events if event["kind"] != "checkpoint"]
    expected = [("start", 0)]
    for attempt in range(len(kills)):
        expected += [("failure", attempt), ("restart", attempt + 1), ("resume", attempt + 1)]
    last = [("straggler", len(kills))] if ("straggler", len(kills)) in kinds else []
    assert kinds == [*expected, *last, ("end", len(kills))]
    assert [event["rank"] for event in run.events if event["kind"] == "failure"] == [num_processes - 1] * len(kills)
    saved = {event["step"] for event in run.events if event["kind"] == "checkpoint"}
    assert saved == set(range(4, num_steps + 1, 4))
    # Each attempt continues from the last checkpoint, and ends before the step in which it was killed.
    for attempt, rank, path in run.step_paths():
        records = read_step_file(path).records
        first = (kills[attempt - 1] - 1) // 4 * 4 + 1 if attempt else 1
        end = kills[attempt] if attempt < len(kills) else num_steps + 1
        steps = [record.step for record in records]
        # The others may finish the step in which the last rank was killed.
        assert steps in ([*range(first, end)], [*range(first, end + (rank < num_processes - 1 and end <= num_steps))])
        losses = _losses(command.directory, rank)
        assert [record.loss.hex() for record in records] == [losses[record.step] for record in records]
        assert all(record.grad_norm > 0 for record in records)
    assert len(run.step_paths()) == num_processes * (len(kills) + 1)
    return folder


@pytest.mark.slow
def test_a_run_with_a_kill_is_recorded_and_equals_a_plain_loop(command: Command) -> None:
    command.write("killed.py", KILLED)
    command.is_warm = True
    result = command.launch("--max_restarts=1", "killed.py", "6", "10", "0", "--api_key", "abc", **RECORD)
    assert result.code == 0, result.err
    folder = _check_killed_run(command, [6], 10, 1, result.wall_s)
    assert result.err.splitlines()[-1] == f"echelon: recorded in echelon-runs/{folder.name}; echelon report shows it"
    info = run_files.read_info(folder)
    assert info["command"][2:] == ["--max_restarts=1", "killed.py", "6", "10", "0", "--api_key", "***"]
    assert (info["script"], info["cwd"], info["board"]) == ("killed.py", str(command.directory), None)
    assert (info["arguments"], info["num_processes"], info["exit_code"]) == (info["command"][4:], 1, 0)
    assert folder.name.split("-", 2)[2] == f"killed-{info['pid']}"
    assert (folder / "config.json").is_file()
    (failure,) = (event for event in run_files.read_lines(folder / "events.jsonl") if event["kind"] == "failure")
    assert failure["text"] == "rank 0 failed first: killed by SIGKILL (signal 9)"
    # The reference: plain PyTorch.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), {}
    for step in range(10):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step + 1] = loss.item().hex()
    assert _losses(command.directory, 0) == losses
    weights = torch.load(command.directory / "weights_0.pt", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_run_that_fails_before_its_first_step_says_where_it_is_recorded_and_repeats_the_note(
    command: Command,
) -> None:
    command.write("fails.py", "raise ValueError('mine')")
    command.is_warm = True
    result = command.launch("--name=wide net", "--tag=a", "--tag", "b", "fails.py", "--cpu", **RECORD)
    assert result.code == 1
    (folder,) = (command.directory / "echelon-runs").iterdir()
    info = run_files.read_info(folder)
    assert (info["name"], info["tags"], folder.name.split("-", 2)[2]) == (
        "wide net",
        ["a", "b"],
        f"wide_net-{info['pid']}",
    )
    (failure,) = (event for event in run_files.read_lines(folder / "events.jsonl") if event["kind"] == "failure")
    report = {name: part["text"].splitlines() for name, part in failure["report"].items()}
    assert report["what"] == ["rank 0 failed first: ValueError: mine"]
    assert [line.strip() for line in report["where"]][:2] == [
        "rank 0 of 1",
        "fails.py:1 in <module>: raise ValueError('mine')",
    ]
    assert report["where"][-1].startswith("  logs: ")
    lines = result.err.splitlines()
    assert lines[-2] == f"echelon: recorded in echelon-runs/{folder.name}; echelon report shows it"
    assert lines[-1].startswith("echelon: note: --cpu after the script was passed to fails.py, not to the launcher")
    assert lines.count(lines[-1]) == 2


@pytest.mark.soak  # test_restarts.py compares the weights with those of a run without a kill
def test_a_run_with_five_kills_is_recorded(command: Command) -> None:
    kills = [6, 11, 18, 22, 35]
    words = [command.write("killed.py", KILLED), ",".join(map(str, kills)), "40", "0.1"]
    result = command.launch("--num_processes=2", "--max_restarts=5", "--quiet", *words, **RECORD)
    assert result.code == 0, result.err
    assert "recorded in" not in result.err
    _check_killed_run(command, kills, 40, 2, result.wall_s)
