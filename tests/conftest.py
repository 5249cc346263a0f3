"""Checks around every test: nothing is left behind; and the end of the rank workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests import harness, order
from tests.leaks import ENVIRON_OF_OTHERS, Snapshot, settled_leaks

# A shell's background job (`make test &`) ignores SIGINT, and every program that a test starts and interrupts would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# With it each part of a `print` is a write of its own, and the lines of ranks that share a pipe mix.
os.environ.pop("PYTHONUNBUFFERED", None)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves an environment variable, a thread, an open file or a process group."""
    before = Snapshot.take()
    yield
    found = settled_leaks(before)
    if not found:
        return
    _restore(before)  # the next test is not to fail for this one
    pytest.fail("this test left something behind:\n  " + "\n  ".join(found), pytrace=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("deepspeed") is not None:
        # DeepSpeed compiles a function when it is imported: a second and more of each new rank.
        harness.import_ahead("torch._inductor.compile_fx")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes (``make test``), bring the files into an order in which none is left for the end that takes long.

    xdist gives whole files away, in this order (--no-loadscope-reorder): by itself it would begin with those of many tests, and those
    of one long test come last, while the other process has nothing to do. Files whose tests wait for the start of programs are
    mixed with those that compute.
    """
    if not hasattr(config, "workerinput"):
        return
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    items[:] = [item for name in order.mixed(files) for item in files[name]]


def pytest_sessionfinish() -> None:
    harness.shut_down(for_good=True)


def _restore(before: Snapshot) -> None:
    for name in {*os.environ, *before.environ} - ENVIRON_OF_OTHERS:
        if name in before.environ:
            os.environ[name] = before.environ[name]
        else:
            del os.environ[name]
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and not before.has_group and distributed.is_initialized():
        distributed.destroy_process_group()
