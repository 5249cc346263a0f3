"""Programs that use DistributedDataParallel and no other library compute the same under ``echelon launch`` as under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.bounded import run_bounded
from tests.ecosystem.run import HERE, environment

pytestmark = pytest.mark.soak

_TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node")
_ECHELON = ("-m", "echelon", "launch", "--cpu", "--num_processes")


def _result(folder: Path, starter: tuple[str, ...], program: str, *args: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    done = run_bounded(
        [sys.executable, *starter, str(HERE / "programs" / program), *args],
        folder=folder,
        variables=environment(folder, [], source=True),
        timeout_s=300,
    )
    results = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    assert (done.returncode, len(results)) == (0, 1), done.stdout[-6000:]
    found: dict[str, Any] = json.loads(results[0])
    return found


@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_a_loop_like_nano_gpts_computes_the_same(tmp_path: Path, num_processes: str) -> None:
    native = _result(tmp_path / "native", (*_TORCHRUN, num_processes), "nano_gpt.py")
    assert native["loss"][-1] < native["loss"][0]
    assert native == _result(tmp_path / "echelon", (*_ECHELON, num_processes), "nano_gpt.py")
    if num_processes == "1":
        assert native == _result(tmp_path / "plain", (), "nano_gpt.py")


def test_a_trainer_like_the_tutorials_computes_the_same_and_resumes_from_its_snapshot(tmp_path: Path) -> None:
    runs = {}
    for way, starter in (("native", _TORCHRUN), ("echelon", _ECHELON)):
        runs[way] = [_result(tmp_path / way, (*starter, "2"), "ddp_snapshots.py", epochs) for epochs in ("1", "3")]
    assert [len(run["losses"]) for run in runs["native"]] == [6, 12]  # 96 samples in batches of 2 * 8
    assert runs["native"] == runs["echelon"]


def test_a_restart_continues_from_the_snapshot(tmp_path: Path) -> None:
    # Not compared with torchrun's restart: with gloo, its second attempt can find the addresses of the first in the store.
    whole = _result(tmp_path / "native", (*_TORCHRUN, "2"), "ddp_snapshots.py", "3")
    starter = ("-m", "echelon", "launch", "--cpu", "--max_restarts", "1", "--num_processes", "2")
    restarted = _result(tmp_path / "echelon", starter, "ddp_snapshots.py", "3", "--crash")
    assert (tmp_path / "echelon" / "crashed").exists()
    assert restarted == {**whole, "losses": whole["losses"][6:]}
