"""The order in which the test files are distributed to several processes."""

from __future__ import annotations

from collections.abc import Collection

# Each takes half a minute or more.
_LONGEST = ("tests/programs/", "tests/launch/test_restarts.py", "tests/launch/test_preemption.py")
# The tests in these folders start programs and wait for them.
_WAITING = ("tests/launch/", "tests/machines/", "tests/side_by_side/")
_COMPUTING = "tests/ranks/"


def mixed(files: Collection[str]) -> list[str]:
    """Return the longest files, then waiting and computing files evenly mixed, then the shortest."""
    longest = [name for name in files if name.startswith(_LONGEST)]
    waiting = [name for name in files if name.startswith(_WAITING) and name not in longest]
    computing = [name for name in files if name.startswith(_COMPUTING)]
    first = {*longest, *waiting, *computing}
    places = [
        ((i + 0.5) / len(group), k, name)
        for k, group in enumerate((waiting, computing))
        for i, name in enumerate(group)
    ]
    return [*longest, *(name for _, _, name in sorted(places)), *(name for name in files if name not in first)]
