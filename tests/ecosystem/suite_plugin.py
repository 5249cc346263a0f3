"""A pytest plugin for the test suites of other projects: it switches echelon on, and writes the outcome of each test to a file.

``suites.py`` loads it with ``-p suite_plugin``. It imports nothing of the tests, because it must come first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType

import pytest

RECORD = Path(os.environ["SUITE_RECORD"])
SECONDS_OF_A_TEST = int(os.environ.get("SUITE_SECONDS_OF_A_TEST", "120"))


class _TestUtilities:
    """Finds ``accelerate.test_utils`` of the installed accelerate: these are tests, which echelon does not have."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith("accelerate.test_utils"):
            return None
        installed = PathFinder.find_spec("accelerate")
        assert installed is not None
        folders = [
            str(Path(folder, *fullname.split(".")[1:-1])) for folder in installed.submodule_search_locations or ()
        ]
        return PathFinder.find_spec(fullname, folders)


if os.environ["SUITE_WAY"] == "swapped":
    import echelon.compat

    echelon.compat.install("accelerate", "transformers")
    sys.meta_path.insert(0, _TestUtilities())  # type: ignore[arg-type]


def _write(test: str, outcome: str, text: str) -> None:
    with RECORD.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "failed", str(report.longrepr)[-2000:])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        lines = str(report.longrepr or "")
        _write(report.nodeid, report.outcome, lines[-3000:])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{item.nodeid} took longer than {SECONDS_OF_A_TEST} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS_OF_A_TEST)
    yield
    signal.alarm(0)
