"""DeepSpeed's hostfile, with the filters ``--include`` and ``--exclude``: the machines of a run and their slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from echelon.base.errors import ConfigError

__all__ = ["Host", "excluding", "included", "including", "read_hostfile"]

_DO = "write one machine per line, such as: worker-0 slots=8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, and the slots (accelerators or processes) that are used."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: str | Path, *, where: str | None = None) -> tuple[Host, ...]:
    """Return the machines of a hostfile, in order: lines such as ``worker-0 slots=8``, and comments after ``#``.

    Args:
        path: of the file.
        where: the setting that names it.

    Raises:
        ConfigError: it cannot be read, a line is invalid, a machine is listed twice, or there is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(
            f"cannot read the hostfile {path}: {reason}", where=where, do="give a file that you can read"
        ) from error
    found: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        place = f"{path}:{number}"
        # max_slots is Open MPI's, whose files DeepSpeed accepts, too.
        match = re.fullmatch(r"([^\s-]\S*)\s+slots\s*=\s*(\d+)(?:\s+max[-_]slots\s*=\s*\d+)?", text)
        if match is None or int(match[2]) == 0:
            raise ConfigError(f"{text!r} is not a machine with slots", where=place, do=_DO)
        if match[1] in found:
            raise ConfigError(f"{match[1]} is listed twice", where=place, do="list it once, with all its slots")
        found[match[1]] = int(match[2])
    if not found:
        raise ConfigError(f"the hostfile {path} names no machines", where=where, do=_DO)
    return tuple(Host(name=name, slots=tuple(range(count))) for name, count in found.items())


def included(text: str, *, where: str) -> tuple[Host, ...]:
    """Return the machines of ``a:0,1@b:0`` without a hostfile: each must name its slots.

    Raises:
        ConfigError: invalid syntax, or slots are missing.
    """
    hosts = []
    for name, slots in _filter(text, where).items():
        if slots is None:
            raise ConfigError(
                f"{text}: the number of slots of {name} is unknown",
                where=where,
                do=f"name them ({name}:0,1), or give a --hostfile",
            )
        hosts.append(Host(name=name, slots=slots))
    return tuple(hosts)


def including(hosts: tuple[Host, ...], text: str, *, where: str) -> tuple[Host, ...]:
    """Return only the machines, and slots, of ``a@b:0,2``, in the order of ``hosts``; without slots, a machine with all of them.

    Raises:
        ConfigError: it is no such text, or names what is not there.
    """
    chosen = _filter(text, where)
    _check(hosts, chosen, text, where)
    return tuple(
        Host(name=host.name, slots=host.slots if (slots := chosen[host.name]) is None else slots)
        for host in hosts
        if host.name in chosen
    )


def excluding(hosts: tuple[Host, ...], text: str, *, where: str) -> tuple[Host, ...]:
    """Return what is left without the machines, and slots, of ``a@b:0,2``.

    Raises:
        ConfigError: it is no such text, names what is not there, or leaves nothing.
    """
    left_out = _filter(text, where)
    _check(hosts, left_out, text, where)
    left = []
    for host in hosts:
        without = left_out.get(host.name, ())
        slots = () if without is None else tuple(slot for slot in host.slots if slot not in without)
        if slots:
            left.append(Host(name=host.name, slots=slots))
    if not left:
        raise ConfigError(f"{text} excludes all slots of all machines", where=where, do="exclude fewer of them")
    return tuple(left)


def _filter(text: str, where: str) -> Mapping[str, tuple[int, ...] | None]:
    """Parse ``a@b:0,2`` into machine -> slots; None: all slots."""
    found: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        match = re.fullmatch(r"([^\s:,@-][^\s:,@]*)(?::(\d+(?:,\d+)*))?", part.strip())
        if match is None:
            raise ConfigError(f"{text!r} is not a list of machines", where=where, do="give worker-0@worker-1:0,2")
        slots = None if match[2] is None else tuple(sorted({int(slot) for slot in match[2].split(",")}))
        if match[1] in found:
            raise ConfigError(
                f"{text} names {match[1]} twice", where=where, do=f"give {match[1]}:0,1 once, with all its slots"
            )
        found[match[1]] = slots
    return found


def _check(hosts: tuple[Host, ...], chosen: Mapping[str, tuple[int, ...] | None], text: str, where: str) -> None:
    known = {host.name: host.slots for host in hosts}
    for name, slots in chosen.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{text}: {name} is not in the hostfile",
                where=where,
                do=f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}",
            )
        missing = [slot for slot in slots or () if slot not in known[name]]
        if missing:
            raise ConfigError(
                f"{text}: {name} has no slot {missing[0]}",
                where=where,
                do=f"give slots 0 to {max(known[name])}, as in the hostfile",
            )
