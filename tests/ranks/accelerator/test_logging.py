"""get_logger on rank zero, on every rank, and on each rank in turn; also before an Accelerator exists."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.accelerator.logging import get_logger
from echelon.base.errors import ConfigError
from tests.harness import run_on_ranks

NAME = "echelon.planted.ranks"


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    own, root = logging.getLogger(NAME), logging.getLogger()
    before = own.level, root.level
    yield
    own.setLevel(before[0])
    root.setLevel(before[1])


class _Lines(logging.Handler):
    """Appends each record to a file that all ranks share."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        with open(self.path, "a") as file:
            file.write(f"{record.getMessage()}\n")


def _log(path: str, rounds: int) -> None:
    logger = get_logger(NAME)
    logger.setLevel(logging.INFO)
    handler = _Lines(path)
    logger.logger.addHandler(handler)
    try:
        logger.info("main")
        for number in range(rounds):
            logger.info("round %d", number, in_order=True)
        logger.info("all", main_process_only=False)
        logger.debug("hidden", in_order=True)
        logger.warning_once("once %s", "a", main_process_only=False)
        logger.warning_once("once %s", "a", main_process_only=False)
        logger.warning_once("once %s", "b")
    finally:
        logger.logger.removeHandler(handler)


def test_records_come_from_ranks_in_order_or_from_rank_zero_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run_on_ranks(_log, str(path), 3, world_size=3)
    lines = path.read_text().splitlines()
    rounds = [line for line in lines if "round" in line]
    assert rounds == [f"[RANK {rank}] round {number}" for number in range(3) for rank in range(3)]
    assert [line for line in lines if "main" in line] == ["[RANK 0] main"]
    assert sorted(line for line in lines if "all" in line) == [f"[RANK {rank}] all" for rank in range(3)]
    assert sorted(line for line in lines if "once a" in line) == [f"[RANK {rank}] once a" for rank in range(3)]
    assert [line for line in lines if "once b" in line] == ["[RANK 0] once b"]
    assert not any("hidden" in line for line in lines)


def test_without_an_accelerator_the_rank_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, NAME)
    monkeypatch.setenv("RANK", "1")
    logger = get_logger(NAME)
    logger.info("quiet")
    logger.info("loud", main_process_only=False)
    logger.info("ordered", in_order=True)
    assert caplog.messages == ["[RANK 1] loud", "[RANK 1] ordered"]


def test_the_record_names_the_callers_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("RANK", raising=False)
    logger = get_logger(NAME, log_level="info")
    logger.info("a")
    logger.log(logging.INFO, "b")
    logger.warning_once("c")
    assert [record.funcName for record in caplog.records] == ["test_the_record_names_the_callers_line"] * 3
    assert {record.filename for record in caplog.records} == {os.path.basename(__file__)}


def test_the_level_comes_from_the_call_then_echelon_then_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger(NAME).getEffectiveLevel() == logging.ERROR
    monkeypatch.setenv("ECHELON_LOG_LEVEL", "debug")
    assert get_logger(NAME).getEffectiveLevel() == logging.DEBUG
    assert get_logger(NAME, log_level="warning").getEffectiveLevel() == logging.WARNING
    assert logging.getLogger().level == logging.WARNING
    monkeypatch.setenv("ECHELON_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"log level 'loud' is unknown\n  where: .*env ECHELON_LOG_LEVEL"):
        get_logger(NAME)
