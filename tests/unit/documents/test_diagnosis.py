"""docs/diagnosis.md: its example runs, its classes are those there are, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.diagnose.goodput import ITEMS
from echelon.diagnose.stall import Class
from echelon.launch.supervisor import STALLED

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def test_the_example_runs() -> None:
    found = re.search(r"```python slow\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    names: dict[str, object] = {}
    exec(found[1].replace("Accelerator()", "Accelerator(cpu=True)"), names)
    names["accelerator"].end_training()  # type: ignore[attr-defined]
    assert names["tokens"] == [b"a", b"long", b"text"]


@pytest.mark.parametrize("kind", [kind for kind in Class if kind is not Class.UNKNOWN])
def test_every_class_is_explained(kind: Class) -> None:
    table = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert any(kind.value in line.split("|")[1] for line in table)


def test_every_item_of_the_ledger_is_explained() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")]
    assert set(ITEMS) <= set(rows)


def test_the_documented_exit_code_is_correct() -> None:
    assert f"| `stop` | the run ends with exit code {STALLED} |" in PAGE
