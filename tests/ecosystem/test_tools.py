"""LLaMA-Factory and ms-swift give the same numbers on echelon as natively, on one and two processes.

``make ecosystem`` installs them and runs these tests.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ecosystem.tools import CASES, compare_case, python_of, write_materials

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("materials")
    write_materials(folder)
    return folder


@pytest.mark.parametrize(
    ("tool", "name", "num_processes"),
    [
        (tool, name, number)
        for tool, cases in CASES.items()
        for name, case in cases.items()
        for number in case.number_of_processes
    ],
)
def test_a_tool_trains_with_the_native_numbers(tool: str, name: str, num_processes: int, materials: Path) -> None:
    if not python_of(tool).exists():
        text = f"NOT COMPARED with the tool's own runs: there is no {python_of(tool)} (make ecosystem)"
        assert os.environ.get("REQUIRE_ECOSYSTEM") != "1", text
        pytest.skip(text)
    outcome, output = compare_case(tool, name, num_processes, materials=materials)
    assert "stands in for accelerate" in output
    assert outcome.unexpected == {}
    # bf16 weights train as they do natively, and echelon says what that loses
    assert ("trained parameters are bfloat16 themselves" in output) == (name == "sft, full, bf16" and tool == "swift")
