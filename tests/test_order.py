"""The order of the test files in several processes."""

from __future__ import annotations

from tests.order import mixed


def test_files_are_sorted_by_duration_without_omission() -> None:
    waiting = [f"tests/launch/test_{i}.py" for i in range(2)] + ["tests/machines/test_a.py"]
    computing = [f"tests/ranks/test_{i}.py" for i in range(6)]
    longest = ["tests/programs/test_programs.py", "tests/launch/test_restarts.py"]
    short = ["tests/test_layering.py", "tests/unit/test_a.py"]
    files = [*short, *waiting, *longest, *computing]
    found = mixed(files)
    assert sorted(found) == sorted(files)
    assert found[:2] == longest
    assert found[-2:] == short
    kinds = "".join("w" if name in waiting else "c" for name in found[2:-2])
    assert kinds == "cwccwccwc"
    assert mixed([]) == []
