"""Parsers for settings that accept several forms: durations, ``report_to``, dicts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from echelon.base.errors import ConfigError
from echelon.base.optional import is_available
from echelon.trainer.arguments.enums import suggest

_CLOCK = re.compile(r"(?:(?:(\d+):)?(\d+):)?(\d+):(\d+)")  # days:hours:minutes:seconds
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# name in transformers -> required package
_SERVICES: Mapping[str, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "comet_ml": "comet_ml",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
    "trackio": "trackio",
}
_FILES = ("jsonl", "csv")
_TRANSFORMERS_ONLY = ("azure_ml", "codecarbon", "dagshub", "flyte", "kubeflow", "neptune")


def parse_duration(given: timedelta | float | str) -> timedelta:
    """Parse a duration: seconds, ``"1:30:00"`` (or ``"2:01:30:00"`` with days), or ``"90m"`` (units: s, m, h, d).

    Raises:
        ConfigError: the value is not a positive duration.
    """
    seconds: float | None = None
    text = str(given).strip()
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif match := _CLOCK.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1.0)
        try:
            seconds = float(number) * unit
        except ValueError:
            seconds = None
    if seconds is None or not seconds > 0:
        raise ConfigError(
            f"max_time={given!r} is not a positive duration",
            where="TrainingArguments.max_time",
            do="pass seconds, 'hours:minutes:seconds', 'days:hours:minutes:seconds', '90m' or '12h'",
        )
    return timedelta(seconds=seconds)


def parse_report_to(given: Any) -> list[str]:
    """Return the tracker names in ``report_to``; ``all`` selects every tracker whose package is installed.

    Raises:
        ConfigError: a tracker is unknown, or only transformers supports it.
    """
    names = [given] if isinstance(given, str) else list(given or ())
    if names in ([], ["none"]):
        return []
    if names == ["all"]:
        return [name for name, package in _SERVICES.items() if is_available(package)]
    for name in names:
        if name in _TRANSFORMERS_ONLY:
            raise ConfigError(
                f"report_to={name!r} is not supported by echelon",
                where="TrainingArguments.report_to",
                do="pass its callback from transformers.integrations to Trainer(callbacks=[...])",
            )
        if name not in _SERVICES and name not in _FILES:
            known = [*_SERVICES, *_FILES, "all", "none"]
            raise ConfigError(
                f"report_to={name!r} is not one of {', '.join(known)}",
                where="TrainingArguments.report_to",
                do=suggest(name, known, otherwise="use one or more of these names"),
            )
    return names


def as_dict(name: str, value: Any) -> Any:
    """Return the dict given as a dict, as a JSON string that starts with a brace, or as the path to a JSON file."""
    if not isinstance(value, (str, Path)) or not str(value):
        return value
    text = str(value)
    try:
        if text.lstrip().startswith("{"):
            return _converted(json.loads(text))
        return json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{name}={text!r} is neither a JSON string nor a readable JSON file: {error}",
            where=f"TrainingArguments.{name}",
            do="pass a dict, a string such as '{\"key\": 1}', or the path to a JSON file",
        ) from error


def _converted(values: Any) -> Any:
    """Convert text such as "true" and "0.1" in a dict from a command line to booleans and numbers."""
    if isinstance(values, dict):
        return {name: _converted(value) for name, value in values.items()}
    if not isinstance(values, str):
        return values
    if values.lower() in ("true", "false"):
        return values.lower() == "true"
    if values.isdigit():
        return int(values)
    return float(values) if values.replace(".", "", 1).isdigit() else values
