"""``echelon test`` for real: two processes train, one is killed, and what comes out is what docs/selftest.md shows."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import Command

_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "selftest.md").read_text(encoding="utf-8")
_NAMES = ["world", "exact", "data", "restart", "bandwidth", "bitwise"]


def _evidence(command: Command) -> dict[str, Any]:
    return json.loads((command.directory / "evidence.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _shape(text: str) -> list[str]:
    """Return the lines of the checks with all numbers made equal, and units of bytes: which size is fastest depends on load."""
    lines = [line[2:] for line in text.splitlines() if line.startswith("\u2713 ")]
    return [re.sub(r"\b[KMG]B\b", "B", re.sub(r"\d[\d.]*(e-\d+)?", "#", line)) for line in lines]


@pytest.mark.soak  # tests/unit/cli/test_test.py has the command's screen and settings
def test_two_processes_pass_every_check_and_the_page_shows_what_they_print(command: Command) -> None:
    # No process that imports ahead: the only restart comes before it is done (test_restarts.py has it).
    result = command.echelon(
        *("test", "--cpu", "--num_processes", "2", "--quick", "--no_warm", "--output", "evidence.json"),
        PYTHONIOENCODING="utf-8",
    )
    assert result.code == 0, result.out + result.err
    shown = re.search(r"\$ echelon test --cpu --num_processes 2\n(.*?)```", _PAGE, re.DOTALL)
    assert shown is not None
    assert _shape(result.out) == _shape(shown[1])
    evidence = _evidence(command)
    assert evidence["passed"] is True
    checks = {check["name"]: check["figures"] for check in evidence["checks"]}
    assert list(checks) == _NAMES
    assert 0 < checks["exact"]["error"] < 1e-12
    assert checks["restart"]["went_on_from_update"] == 8
    assert checks["restart"]["weights"] == checks["exact"]["weights"]
    assert checks["bitwise"]["weights"] == checks["bitwise"]["weights_alone"] != checks["exact"]["weights"]
    assert sorted(path.name for path in command.directory.iterdir() if path.name != ".cache") == ["evidence.json"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("flags", "left_out"),
    [
        (["--num_processes", "3", "--engine", "zero1"], []),
        (["--num_processes", "3", "--engine", "fsdp2", "--mixed_precision", "bf16"], []),
        (["--num_processes", "1"], ["bandwidth", "bitwise"]),
        (["--config_file", "run.yaml"], []),
    ],
)
def test_other_layouts_pass_too(command: Command, flags: list[str], left_out: list[str]) -> None:
    command.write("run.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\n")
    result = command.echelon("test", "--cpu", "--quick", "--output", "evidence.json", *flags)
    assert result.code == 0, result.out + result.err
    passed = {check["name"]: check["passed"] for check in _evidence(command)["checks"]}
    assert passed == {name: None if name in left_out else True for name in _NAMES}


@pytest.mark.soak
def test_two_machines_with_a_folder_each_pass_every_check(command: Command) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    layout = ["--cpu", "--nproc_per_node", "1", "--nnodes", "2", "--rdzv_endpoint", f"127.0.0.1:{port}", "--quick"]
    processes = [
        command.start(
            [sys.executable, "-m", "echelon", "test", *layout, "--node_rank", str(rank), "--output", f"{rank}.json"],
            ECHELON_TOKEN="0123456789abcdef",
        )
        for rank in (0, 1)
    ]
    for rank, result in enumerate([command.finish(process) for process in processes]):
        assert result.code == 0, result.out + result.err
        evidence = json.loads((command.directory / f"{rank}.json").read_text(encoding="utf-8"))
        assert [check["name"] for check in evidence["checks"] if check["passed"]] == _NAMES
        assert "127.0.0.1" not in json.dumps(evidence)


@pytest.mark.soak
def test_a_rank_that_cannot_start_is_explained(command: Command) -> None:
    command.write("broken/sitecustomize.py", "import os\nif os.environ.get('RANK') == '1':\n    os._exit(9)\n")
    result = command.echelon(
        *("test", "--cpu", "--num_processes", "2", "--output", "evidence.json"),
        PYTHONPATH=str(command.directory / "broken"),
    )
    assert result.code == 1
    assert "rank 1 failed first: exit code 9" in result.out
    assert [check["passed"] for check in _evidence(command)["checks"]] == [False]


@pytest.mark.soak
def test_accelerators_that_are_not_there_are_a_wrong_setting(command: Command) -> None:
    result = command.echelon("test", "--gpus", "all")
    assert result.code == 2
    assert "this machine has no accelerator" in result.err
