"""Hyperparameters: what a script may record, what is kept of it, and what readers find."""

from __future__ import annotations

import argparse
import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from echelon.base.errors import UsageError
from echelon.status.hyperparameters import checked_hyperparameters, plain_hyperparameters, read_hyperparameters


class Kind(str, enum.Enum):
    COSINE = "cosine"


def _checked(values: Any) -> dict[str, Any]:
    return checked_hyperparameters(values, where="log_hyperparameters()")


def test_json_values_and_their_like_are_kept() -> None:
    given = {
        "lr": 0.1,
        "steps": 3,
        "on": True,
        "none": None,
        "model": {"sizes": (8, [16]), "deep": {"kind": Kind.COSINE}},
    }
    assert _checked(given) == {
        "lr": 0.1,
        "steps": 3,
        "on": True,
        "none": None,
        "model": {"sizes": [8, [16]], "deep": {"kind": "cosine"}},
    }
    found = _checked({"lr": numpy.float32(0.5), "n": numpy.int64(2)})
    assert found == {"lr": 0.5, "n": 2}
    assert [type(value) for value in found.values()] == [float, int]
    assert _checked(vars(argparse.Namespace(lr=0.1))) == {"lr": 0.1}


LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (SimpleNamespace(lr=1), "hyperparameters are passed as a dict, not as SimpleNamespace"),
        ({"path": {"data": Path("x")}}, "hyperparameter 'path.data' is of type PosixPath, but only texts"),
        ({"sizes": [1, {2}]}, r"hyperparameter 'sizes\[1\]' is of type set, but only texts"),
        ({3: 1}, "the name of a hyperparameter must be a text, but 3 is of type int"),
        ({"model": {3: 1}}, "the names in hyperparameter 'model' must be texts, but 3 is of type int"),
        (LOOP, "is nested more than 16 times"),
    ],
)
def test_other_values_are_an_error_that_names_them(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        _checked(values)
    assert "log_hyperparameters()" in str(raised.value)
    assert raised.value.do


@pytest.mark.parametrize("convert", [_checked, plain_hyperparameters])
def test_no_secret_is_recorded(convert: Any) -> None:
    given = {
        "hub_token": "abc",
        "pin_token": 1234,
        "db": {"password": "abc", "credentials": {"user": "me"}, "hosts": ["https://me:abc@host/x"]},
        "note": "hf_abcdefghijklmnop",
        "pad_token_id": 0,
        "key_dim": 64,
        "use_auth_token": True,
        "push_token": None,
        "tokenizer": "bert",
    }
    assert convert(given) == {
        "hub_token": "***",
        "pin_token": "***",
        "db": {"password": "***", "credentials": "***", "hosts": ["https://me:***@host/x"]},
        "note": "***",
        "pad_token_id": 0,
        "key_dim": 64,
        "use_auth_token": True,
        "push_token": None,
        "tokenizer": "bert",
    }


def test_objects_of_other_types_become_texts_that_are_equal_in_each_run() -> None:
    found = plain_hyperparameters({"kind": Kind.COSINE, "path": Path("a/b"), "set": {"b", "a"}, "object": object()})
    assert found == {"kind": "cosine", "path": "a/b", "set": ["a", "b"], "object": "object"}


def test_readers_find_the_last_values_and_those_that_are_not_defaults_first() -> None:
    lines: list[dict[str, Any]] = [
        {"group": "arguments", "values": {"seed": 42, "lr": 0.1}, "defaults": ["seed"]},
        {"group": "training", "values": {"optimizer": {"lr": 0.1, "eps": 1e-8}}, "defaults": ["optimizer.eps"]},
        {"group": "logged", "values": {"lr": 1, "sizes": {}}},
        {"group": "logged", "values": {"lr": 2}},
        {"group": "of another version", "values": {"x": 1}},
        {"group": "logged", "values": "torn"},
        {},
    ]
    assert [(one.group, one.name, one.value, one.is_default) for one in read_hyperparameters(lines)] == [
        ("logged", "lr", 2, False),
        ("logged", "sizes", {}, False),
        ("arguments", "lr", 0.1, False),
        ("arguments", "seed", 42, True),
        ("training", "optimizer.lr", 0.1, False),
        ("training", "optimizer.eps", 1e-8, True),
    ]
