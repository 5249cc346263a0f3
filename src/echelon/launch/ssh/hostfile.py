"""Reads a run's machines and slots from a DeepSpeed hostfile and the filters ``--include`` and ``--exclude``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_

_DO = N_("write one machine per line, such as: worker-0 slots=8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine and its slots (accelerators or processes) that the run uses."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: str | Path, *, where: str | None = None) -> tuple[Host, ...]:
    """Return a hostfile's machines, in order. Lines have the form ``worker-0 slots=8``; ``#`` starts a comment.

    Args:
        path: path to the hostfile.
        where: where the path was set, for error messages.

    Raises:
        ConfigError: the file cannot be read, a line is invalid, a machine is listed twice, or no machine is listed.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else _("not a text file")
        raise ConfigError(
            _("cannot read the hostfile {path}: {reason}", path=path, reason=reason),
            where=where,
            do=_("check the path and its permissions"),
        ) from error
    found: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        place = f"{path}:{number}"
        # DeepSpeed also accepts Open MPI's hostfiles, which may contain max_slots.
        match = re.fullmatch(r"([^\s-]\S*)\s+slots\s*=\s*(\d+)(?:\s+max[-_]slots\s*=\s*\d+)?", text)
        if match is None or int(match[2]) == 0:
            raise ConfigError(_("{text!r} is not a valid hostfile line", text=text), where=place, do=_DO)
        if match[1] in found:
            raise ConfigError(
                _("{host} is listed twice", host=match[1]), where=place, do=_("list it once, with all its slots")
            )
        found[match[1]] = int(match[2])
    if not found:
        raise ConfigError(_("the hostfile {path} lists no machines", path=path), where=where, do=_DO)
    return tuple(Host(name=name, slots=tuple(range(count))) for name, count in found.items())


def included(text: str, *, where: str) -> tuple[Host, ...]:
    """Return the machines in a filter such as ``a:0,1@b:0`` without a hostfile; each machine must list slots.

    Raises:
        ConfigError: the syntax is invalid, or a machine lists no slots.
    """
    hosts = []
    for name, slots in _filter(text, where).items():
        if slots is None:
            raise ConfigError(
                _("{text}: the number of slots of {name} is unknown", text=text, name=name),
                where=where,
                do=_("list the slots ({name}:0,1), or add --hostfile FILE", name=name),
            )
        hosts.append(Host(name=name, slots=slots))
    return tuple(hosts)


def including(hosts: tuple[Host, ...], text: str, *, where: str) -> tuple[Host, ...]:
    """Return the machines and slots that a filter such as ``a@b:0,2`` selects, in the order of ``hosts``.

    If a machine lists no slots, all its slots are selected.

    Raises:
        ConfigError: the syntax is invalid, or a machine or slot is not in ``hosts``.
    """
    chosen = _filter(text, where)
    _check(hosts, chosen, text, where)
    return tuple(
        Host(name=host.name, slots=host.slots if (slots := chosen[host.name]) is None else slots)
        for host in hosts
        if host.name in chosen
    )


def excluding(hosts: tuple[Host, ...], text: str, *, where: str) -> tuple[Host, ...]:
    """Return ``hosts`` without the machines and slots that a filter such as ``a@b:0,2`` selects.

    Raises:
        ConfigError: the syntax is invalid, a machine or slot is not in ``hosts``, or nothing is left.
    """
    excluded = _filter(text, where)
    _check(hosts, excluded, text, where)
    left = []
    for host in hosts:
        removed = excluded.get(host.name, ())
        slots = () if removed is None else tuple(slot for slot in host.slots if slot not in removed)
        if slots:
            left.append(Host(name=host.name, slots=slots))
    if not left:
        raise ConfigError(
            _("{text} excludes all slots on all machines", text=text),
            where=where,
            do=_("exclude fewer machines or slots"),
        )
    return tuple(left)


def _filter(text: str, where: str) -> Mapping[str, tuple[int, ...] | None]:
    """Parse a filter such as ``a@b:0,2`` into a dict from machine to slots; None means all slots."""
    found: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        match = re.fullmatch(r"([^\s:,@-][^\s:,@]*)(?::(\d+(?:,\d+)*))?", part.strip())
        if match is None:
            raise ConfigError(
                _("{text!r} is not a list of machines", text=text),
                where=where,
                do=_("use the form worker-0@worker-1:0,2"),
            )
        slots = None if match[2] is None else tuple(sorted({int(slot) for slot in match[2].split(",")}))
        if match[1] in found:
            raise ConfigError(
                _("{text} names {host} twice", text=text, host=match[1]),
                where=where,
                do=_("list it once, with all its slots: {host}:0,1", host=match[1]),
            )
        found[match[1]] = slots
    return found


def _check(hosts: tuple[Host, ...], chosen: Mapping[str, tuple[int, ...] | None], text: str, where: str) -> None:
    known = {host.name: host.slots for host in hosts}
    for name, slots in chosen.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                _("{text}: {name} is not in the hostfile", text=text, name=name),
                where=where,
                do=_("did you mean {near}?", near=near[0]) if near else _("use one of {known}", known=", ".join(known)),
            )
        missing = [slot for slot in slots or () if slot not in known[name]]
        if missing:
            raise ConfigError(
                _("{text}: {name} has no slot {slot}", text=text, name=name, slot=missing[0]),
                where=where,
                do=_("use slots 0 to {last}, or increase slots= in the hostfile", last=max(known[name])),
            )
