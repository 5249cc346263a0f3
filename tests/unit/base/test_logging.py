"""Loggers log on rank zero, unless a call requests every rank."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from echelon.base.logging import get_logger

NAME = "echelon.planted"


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.INFO, NAME)


def test_a_single_process_and_rank_zero_log_until_another_rank_becomes_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = get_logger(NAME)
    logger.warning("%d of %s", 1, "two")
    logger.debug("below the level")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        logger.info(rank)
    assert caplog.messages == ["1 of two", "0"]


@pytest.mark.parametrize("method", ["debug", "info", "warning", "error", "critical", "exception"])
def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str) -> None:
    monkeypatch.setenv("RANK", "1")
    getattr(get_logger(NAME), method)("hello")
    get_logger(NAME).log(logging.ERROR, "hello")
    assert caplog.messages == []


def test_every_rank_logs_if_the_call_requests_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "1")
    get_logger(NAME).error("hello", all_ranks=True)
    get_logger(NAME).error("silence", all_ranks=False)
    assert caplog.messages == ["hello"]


@pytest.mark.parametrize("way", ["info", "log"])
def test_the_record_names_the_line_of_the_caller(caplog: pytest.LogCaptureFixture, way: str) -> None:
    if way == "info":
        get_logger(NAME).info("hello")
    else:
        get_logger(NAME).log(logging.INFO, "hello")
    assert caplog.records[0].funcName == "test_the_record_names_the_line_of_the_caller"
    assert caplog.records[0].filename == "test_logging.py"


def test_an_exception_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ZeroDivisionError("planted")
    except ZeroDivisionError:
        get_logger(NAME).exception("it broke")
    assert "ZeroDivisionError: planted" in caplog.text


def test_stacklevel_counts_from_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    def inner() -> None:
        get_logger(NAME).info("hello", stacklevel=2)
        get_logger(NAME).log(logging.INFO, "hello", stacklevel=2)

    inner()
    assert [record.funcName for record in caplog.records] == ["test_stacklevel_counts_from_the_caller"] * 2


_ON_3_10 = """
import logging, sys
from echelon.base.logging import get_logger

seen = []
handler = logging.Handler()
handler.emit = lambda record: seen.append(record.funcName)
logging.getLogger("x").addHandler(handler)

def inner(**kwargs):
    get_logger("x").warning("a", **kwargs)
    get_logger("x").log(logging.WARNING, "b", **kwargs)

def outer():
    inner(stacklevel=2)

inner()
outer()
print(seen)
"""


def test_python_3_10_names_the_same_lines() -> None:
    """It counts frames of the logging module on the way to the caller, and later versions do not."""
    python = shutil.which("python3.10")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip("NOT RUN: there is no python3.10 on the PATH that starts")
    source = str(Path(__file__).resolve().parents[3] / "src")
    result = subprocess.run(
        [python, "-c", _ON_3_10],
        env={"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "['inner', 'inner', 'outer', 'outer']"
