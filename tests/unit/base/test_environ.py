"""The environment is read and written in one place, and restored.

``os.getenv`` in the assertions: a failing ``in os.environ`` would print the whole environment.
"""

from __future__ import annotations

import os

import pytest

from echelon.base import environ


def test_an_unset_and_an_empty_variable_are_both_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHELON_PLANTED", raising=False)
    assert environ.get("ECHELON_PLANTED") is None
    monkeypatch.setenv("ECHELON_PLANTED", "")
    assert environ.get("ECHELON_PLANTED") is None
    monkeypatch.setenv("ECHELON_PLANTED", "0")
    assert environ.get("ECHELON_PLANTED") == "0"


def test_patch_sets_and_removes_in_the_block_and_restores_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_A", "old")
    monkeypatch.setenv("ECHELON_B", "")
    monkeypatch.delenv("ECHELON_C", raising=False)
    with environ.patch({"ECHELON_A": None, "ECHELON_B": "new", "ECHELON_C": "new"}):
        assert os.getenv("ECHELON_A") is None
        assert os.getenv("ECHELON_B") == os.getenv("ECHELON_C") == "new"
    assert os.getenv("ECHELON_A") == "old"
    assert os.getenv("ECHELON_B") == ""  # set and empty, as it was
    assert os.getenv("ECHELON_C") is None


def test_patch_restores_after_an_error_and_after_writes_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHELON_A", raising=False)

    def write_and_fail() -> None:
        environ.write({"ECHELON_A": "2"})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), environ.patch({"ECHELON_A": "1"}):
        write_and_fail()
    assert os.getenv("ECHELON_A") is None


def test_a_failing_patch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHELON_A", raising=False)
    with pytest.raises(ValueError, match="null"), environ.patch({"ECHELON_A": "1", "ECHELON_B": "a\0b"}):
        pytest.fail("the block ran")
    assert os.getenv("ECHELON_A") is None


def test_write_removes_none_values_and_ignores_unset_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_A", "1")
    environ.write({"ECHELON_A": None})
    environ.write({"ECHELON_A": None})
    assert os.getenv("ECHELON_A") is None
