"""Without echelon launch, the ranks of a run find one folder, which rank 0 names, and describe the run in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon.base import environ
from echelon.distributed.record.recorder import ProcessRecorder
from echelon.distributed.record.run_place import RunWithoutLauncher
from echelon.report.run_folder import read_run
from echelon.status.run_files import read_lines
from echelon.status.step_records import read_step_file
from echelon.world.launch_variables import NO_RECORD_VARIABLE
from tests.harness import run_on_ranks


def _record_without_launcher(folder: str, num_steps: int) -> str:
    with environ.patch({NO_RECORD_VARIABLE: None}), pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.delattr(sys, "last_type", raising=False)  # of an error that C++ printed during an earlier test
        recorder = ProcessRecorder(RunWithoutLauncher())
        recorder.log({"before": 1.0}, step=0)
        recorder.log_hyperparameters("logged", {"width": 8})
        recorder.watch_plain_optimizers()
        torch.distributed.barrier()  # rank 0 has published the name before the first reduction
        assert not list(Path(folder).glob("echelon-runs/*/records")) or num_steps
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        for _ in range(num_steps):
            optimizer.step()
        recorder.log({"after": 2.0})
        place = recorder._place
        recorder.close()
        return "" if place is None else str(place.folder)


def test_without_a_launcher_all_ranks_use_the_folder_of_rank_0(tmp_path: Path) -> None:
    assert run_on_ranks(_record_without_launcher, str(tmp_path), 0, world_size=2) == ["", ""]
    assert list(tmp_path.iterdir()) == []  # nothing was trained
    first, second = run_on_ranks(_record_without_launcher, str(tmp_path), 3, world_size=2)
    assert first == second
    run = read_run(first)
    assert [path[:2] for path in run.step_paths()] == [(0, 0), (0, 1)]
    assert all(len(read_step_file(path).records) == 3 for _, _, path in run.step_paths())
    assert [line["values"] for line in run.metrics] == [{"before": 1.0}, {"after": 2.0}]
    # By rank 0, and once for each object.
    assert len(read_lines(run.folder / "hyperparameters.jsonl")) == 2
    found = {one.name: one.value for one in run.hyperparameters}
    assert {"width": 8, "optimizer.class": "SGD", "optimizer.num_parameters": 1}.items() <= found.items()
    assert (run.outcome, run.facts["num_processes"], run.facts["num_machines"]) == ("succeeded", 2, 1)
    goodput = run.goodput
    assert goodput is not None
    assert sum(goodput["parts"].values()) == pytest.approx(goodput["wall_s"], rel=0.005)
    assert [event["kind"] for event in run.events] == ["start", "end"]
