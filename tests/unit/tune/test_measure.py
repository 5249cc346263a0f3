"""``echelon tune``: which settings are tried, how they are measured, and which one is recommended."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main
from echelon.report.run_folder import read_run
from echelon.report.step_series import step_series
from echelon.tune import candidates as of_machine, measure as measuring
from echelon.tune.candidates import Candidate, candidates
from echelon.tune.measure import TriedRun, measure, relative_loss, too_few_steps
from tests.recorded_runs import write_run

ONE = Candidate(name="1 process, safe", flags=("--cpu", "--num_processes", "1"), num_processes=1)
FAST = Candidate(name="1 process, max", flags=("--cpu", "--num_processes", "1", "--speed", "max"), num_processes=1)
TWO = Candidate(name="2 processes, safe", flags=("--cpu", "--num_processes", "2"), num_processes=2)


def _machine(
    monkeypatch: pytest.MonkeyPatch, *, cores: int, devices: int, bf16: bool = True, compiler: bool = True
) -> None:
    monkeypatch.setattr(of_machine, "usable_cores", lambda: cores)
    monkeypatch.setattr(of_machine, "num_devices", lambda: devices)
    monkeypatch.setattr(of_machine, "has_bf16", lambda *, cpu: bf16)
    monkeypatch.setattr(of_machine.shutil, "which", lambda name: name if compiler else None)


def test_the_default_comes_first_and_the_machine_decides_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, cores=4, devices=0)
    tried, skipped = candidates(cpu=False)
    assert [(one.num_processes, one.name.partition(", ")[2]) for one in tried] == [
        *((n, speed) for n in (1, 2, 4) for speed in ("safe", "max")),
        (1, "max, torch.compile"),
    ]
    assert tried[0].flags == ("--cpu", "--num_processes", "1")
    assert skipped == []
    _machine(monkeypatch, cores=64, devices=8)
    assert [one.num_processes for one in candidates(cpu=False)[0]] == [8, 8, 1, 1, 2, 2, 8]
    assert all("--cpu" not in one.flags for one in candidates(cpu=False)[0])


def test_what_is_not_tried_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, cores=1, devices=0, bf16=False, compiler=False)
    tried, skipped = candidates(cpu=False)
    assert [one.num_processes for one in tried] == [1, 1]
    assert {one.name: one.reason for one in skipped} == {
        "2 processes": "this machine has one core",
        "bf16 autocast": "this device does not compute bf16 natively",
        "torch.compile": "there is no C++ compiler",
    }


def _measured(candidate: Candidate, folder: Path, *, step_ms: float, seed: int = 0) -> TriedRun:
    series = step_series(read_run(write_run(folder, candidate.name, num_ranks=candidate.num_processes, seed=seed)))
    return TriedRun(
        candidate=candidate,
        step_ms=step_ms,
        samples_per_s=64e3 / step_ms,
        memory_mb=100.0,
        num_steps=200,
        series=series,
    )


def test_losses_are_compared_over_common_steps_and_only_of_the_same_batches(tmp_path: Path) -> None:
    one, again = (_measured(ONE, tmp_path / name, step_ms=10.0) for name in "ab")
    assert relative_loss(one, again) == 0.0
    other = _measured(FAST, tmp_path / "c", step_ms=10.0, seed=1)
    assert (relative_loss(other, one) or 0.0) > 0.0
    assert relative_loss(_measured(TWO, tmp_path / "d", step_ms=10.0), one) is None
    assert relative_loss(TriedRun(candidate=ONE, failure="x"), one) is None


def _tune(monkeypatch: pytest.MonkeyPatch, found: list[TriedRun], *flags: str) -> int:
    answers = {one.candidate: one for one in found}
    monkeypatch.setattr(of_machine, "candidates", lambda *, cpu: (list(answers), []))
    monkeypatch.setattr(measuring, "measure", lambda candidate, *_args, **_kwargs: answers[candidate])
    with pytest.raises(SystemExit) as end:
        main(["tune", *flags, __file__, "--lr", "0.1"])
    return int(end.value.code or 0)


def test_the_fastest_setting_is_printed_as_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = TriedRun(candidate=TWO, failure="ended with exit code 1: ValueError")
    found = [_measured(ONE, tmp_path / "a", step_ms=20.0), _measured(FAST, tmp_path / "b", step_ms=12.5), failed]
    assert _tune(monkeypatch, found) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err.splitlines() == [  # lines, because stderr is no terminal here
        "echelon: trying 3 settings, 30 s each",
        "echelon: 1 of 3: 1 process, safe: 20.00 ms per step",
        "echelon: 2 of 3: 1 process, max: 12.50 ms per step",
        "echelon: 3 of 3: 2 processes, safe: ended with exit code 1: ValueError",
    ]
    assert lines[-1] == f"fastest: echelon launch --cpu --num_processes 1 --speed max {__file__} --lr 0.1"
    assert "12.50 ms" in lines[2]
    assert "1.60x" in lines[2]
    assert lines[3].endswith("ended with exit code 1: ValueError")
    assert _tune(monkeypatch, found, "--json") == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    assert answer["best"] == "1 process, max"
    assert [one["failure"] for one in answer["settings"]] == [None, None, "ended with exit code 1: ValueError"]


def test_too_few_steps_are_blamed_on_the_time_only_if_the_script_used_it() -> None:
    assert too_few_steps(4, seconds=30.0) == "only 4 steps within 30 s; add --seconds"
    assert too_few_steps(4, seconds=None).startswith(
        "the script ended after 4 steps, too few to measure; pass arguments"
    )


def test_a_gain_within_the_noise_is_not_recommended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [_measured(ONE, tmp_path / "a", step_ms=20.0), _measured(FAST, tmp_path / "b", step_ms=19.5)]
    assert _tune(monkeypatch, found) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the default is the fastest, or as fast as any other"
    monkeypatch.setenv("LANGUAGE", "zh_CN")
    assert _tune(monkeypatch, found) == 0
    head, *_, last = capsys.readouterr().out.splitlines()
    assert all(re.search("[\u4e00-\u9fff]{2}", line) for line in (head, last))
    assert not re.search("[A-Za-z]{3,}", last)


def test_if_nothing_could_be_measured_the_exit_code_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _tune(monkeypatch, [TriedRun(candidate=ONE, failure="no step was recorded")]) == 2
    assert "no setting could be measured" in capsys.readouterr().err


def test_a_script_that_is_missing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tune", "missing.py"])
    assert end.value.code == 2
    assert "missing.py is not a file" in capsys.readouterr().err


SCRIPT = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from echelon import Accelerator

if len(sys.argv) > 1:
    raise ValueError("bad argument")
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(
    model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(4096, 2)), batch_size=4)
)
for (x,) in loader:
    time.sleep(0.01)
    optimizer.zero_grad()
    accelerator.backward(model(x).square().sum())
    optimizer.step()
"""


@pytest.mark.soak
def test_a_run_is_measured_and_stopped_and_a_failure_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = measure(ONE, str(script), [], seconds=2.0, folder=tmp_path / "a")  # the whole takes 10 s
    assert found.failure == ""
    assert 10.0 < found.step_ms < 100.0
    assert found.samples_per_s == pytest.approx(4e3 / found.step_ms)
    assert found.num_steps < 1024
    failed = measure(ONE, str(script), ["x"], seconds=60.0, folder=tmp_path / "b")
    assert failed.failure.startswith("ended with exit code 1: ")
    assert "ValueError: bad argument" in failed.failure


@pytest.mark.soak
def test_tune_finds_a_setting_for_the_example_that_is_faster_when_measured_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = str(Path(__file__).parents[3] / "examples" / "mnist_accelerator.py")
    with pytest.raises(SystemExit):
        main(["tune", "--seconds", "30", "--json", script])
    answer = json.loads(capsys.readouterr().out)
    rates = {one["name"]: one["samples_per_s"] or 0.0 for one in answer["settings"]}
    default, best = answer["settings"][0]["name"], answer["best"]
    assert rates[best] > 1.3 * rates[default]
    again: dict[str, Any] = {}
    for number, one in enumerate(answer["settings"]):
        if one["name"] in (default, best):
            candidate = Candidate(name=one["name"], flags=tuple(one["flags"]), num_processes=1)
            again[one["name"]] = measure(candidate, script, [], seconds=30, folder=tmp_path / str(number)).samples_per_s
    assert again[best] > 1.3 * again[default]
