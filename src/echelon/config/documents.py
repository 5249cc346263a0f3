"""Reads YAML, JSON and TOML config files into a flat list of entries with line numbers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _

if TYPE_CHECKING:
    from yaml import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentEntry:
    """One value in a config file."""

    keys: tuple[str, ...]
    """Keys that lead to the value, outermost first; the last key is the value's own."""
    value: Any
    """The parsed value, which is never a non-empty mapping."""
    place: str
    """``path:line``."""


def read(path: str | Path) -> list[DocumentEntry]:
    """Return the entries in the file ``path``, in order. The suffix selects TOML or JSON; a file with any other suffix is
    read as YAML.

    Raises:
        ConfigError: the file is missing or invalid, contains a key twice, or does not contain a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            _("cannot read the config file {path}: {strerror}", path=path, strerror=error.strerror),
            do=_("check the path"),
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            _("{path} is not valid UTF-8: {error}", path=path, error=error), do=_("save it as UTF-8")
        ) from error
    entries = _read_toml(path, text) if path.suffix == ".toml" else _read_yaml(path, text)
    seen: dict[tuple[str, ...], str] = {}
    for entry in entries:
        if entry.keys in seen:
            raise ConfigError(
                _("{keys} is set twice", keys=".".join(entry.keys)),
                where=f"file {seen[entry.keys]} and {entry.place}",
                do=_("remove one of the two"),
            )
        seen[entry.keys] = entry.place
    return entries


def _read_yaml(path: Path, text: str) -> list[DocumentEntry]:
    import yaml  # noqa: PLC0415 - takes 20 ms, and not every command reads a file

    is_json = path.suffix == ".json"
    try:
        if is_json:
            data = json.loads(text)
            text = text.expandtabs()  # YAML rejects the tabs that may indent JSON; JSON strings cannot contain tabs
        else:
            data = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError) as error:
        kind = "JSON" if is_json else "YAML"
        raise ConfigError(
            _("{path} is not valid {kind}: {error}", path=path, kind=kind, error=error),
            do=_("fix the file at the position named above"),
        ) from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise ConfigError(
            _("{path} does not contain a mapping of settings", path=path), do=_("write lines of the form `name: value`")
        )
    return list(_flat(path, root, data, ()))


def _flat(path: Path, node: Node, data: dict[Any, Any], keys: tuple[str, ...]) -> Iterator[DocumentEntry]:
    # The nodes provide line numbers and duplicate keys, the parsed data provides the values.
    values = {str(key): value for key, value in data.items()}
    for key, child in node.value:
        name = str(key.value)
        if name not in values:  # `<<: *other`, or a name that YAML does not parse as text (`on: 1`)
            raise ConfigError(
                _("{name!r} is not a valid setting name", name=name),
                where=f"file {path}:{key.start_mark.line + 1}",
                do=_(
                    "write each setting explicitly, without YAML merge keys (<<) or names that YAML parses as true or "
                    "false"
                ),
            )
        value = values[name]
        here = (*keys, name)
        if isinstance(value, dict) and value and child.id == "mapping":
            yield from _flat(path, child, value, here)
        else:
            yield DocumentEntry(keys=here, value=value, place=f"{path}:{key.start_mark.line + 1}")


def _read_toml(path: Path, text: str) -> list[DocumentEntry]:
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - needed for TOML files only
    else:
        import tomli as tomllib  # noqa: PLC0415 - the same parser for Python before 3.11
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            _("{path} is not valid TOML: {error}", path=path, error=error),
            do=_("fix the file at the position named above"),
        ) from error
    lines = _lines_of_toml(text)

    def flat(table: dict[str, Any], keys: tuple[str, ...]) -> Iterator[DocumentEntry]:
        for name, value in table.items():
            here = (*keys, name)
            if isinstance(value, dict) and value:
                yield from flat(value, here)
            else:
                line = next((lines[here[:n]] for n in range(len(here), 0, -1) if here[:n] in lines), 1)
                yield DocumentEntry(keys=here, value=value, place=f"{path}:{line}")

    return list(flat(data, ()))


def _lines_of_toml(text: str) -> dict[tuple[str, ...], int]:
    """Return the line number of each key, which tomllib does not report."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            table = tuple(part.strip(" \"'") for part in header[1].split("."))
            lines.setdefault(table, number)
        elif name := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            lines.setdefault((*table, *(part.strip("\"'") for part in name[1].split("."))), number)
    return lines
