"""Leak checks around every test, and the shutdown of the rank workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests import harness, order
from tests.garbage import freeze_new_modules
from tests.leaks import ENVIRON_OF_OTHERS, Snapshot, settled_leaks

# A background job of a shell (`make test &`) ignores SIGINT, and programs started by tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# With this variable each part of a `print` is a separate write, so the lines of ranks that share a pipe are mixed.
os.environ.pop("PYTHONUNBUFFERED", None)
# With this variable each process that a test starts would compile echelon anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The tests of recording remove it; the programs of all others leave no folder.
os.environ["ECHELON_NO_RECORD"] = "1"
# Tests quote messages in English, without colours.
os.environ["LC_ALL"] = "C.UTF-8"
for _name in ("LANGUAGE", "FORCE_COLOR"):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves an environment variable, a thread, an open file or a process group."""
    freeze_new_modules()
    before = Snapshot.take()
    yield
    found = settled_leaks(before)
    if not found:
        return
    _restore(before)  # the next test must not fail because of this one
    pytest.fail("this test leaks:\n  " + "\n  ".join(found), pytrace=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("deepspeed") is not None:
        # DeepSpeed compiles a function at import, which takes more than a second on each new rank.
        harness.import_ahead("torch._inductor.compile_fx")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark the cases beyond a test's sample as slow. Order the test files for several processes (``make test``).

    No long file may start at the end. xdist distributes whole files in this order (--no-loadscope-reorder). By default it would start with files of many tests, and a file
    with one long test would run last, while the other processes are idle. Files whose tests wait for programs are mixed with files
    that compute.
    """
    order.mark_beyond_samples(items)
    yield
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
