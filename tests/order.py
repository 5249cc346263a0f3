"""Which cases of a test are quick, and the order in which the test files are distributed to several processes."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest

# Each takes half a minute or more.
_LONGEST = ("tests/programs/", "tests/launch/test_restarts.py", "tests/launch/test_preemption.py")
# The tests in these folders start programs and wait for them.
_WAITING = ("tests/launch/", "tests/machines/", "tests/side_by_side/")
_COMPUTING = "tests/ranks/"


def mark_beyond_samples(items: Sequence[pytest.Item]) -> None:
    """Of a test with the mark ``sample(n)``, leave ``n`` drawn cases to ``make test``, and mark the others as slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "sample" in marks and not marks & {"slow", "soak", "gpu"}:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, found in cases.items():
        mark = found[0].get_closest_marker("sample")
        assert mark is not None
        (size,) = mark.args
        draw = random.Random(name)  # the same cases in each run
        for item in set(found) - set(draw.sample(found, min(size, len(found)))):
            item.add_marker(pytest.mark.slow)


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
