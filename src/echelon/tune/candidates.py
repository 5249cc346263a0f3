"""The settings that ``echelon tune`` tries on this machine, and those that it skips, with the reason."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from echelon.base.cores import usable_cores
from echelon.base.device import has_bf16, num_devices
from echelon.base.messages.translation import gettext as _


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Launch flags to try."""

    name: str
    flags: tuple[str, ...]
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Settings that are not tried."""

    name: str
    reason: str


def candidates(*, cpu: bool) -> tuple[list[Candidate], list[Skipped]]:
    """Return what to try and what not; the first candidate is the default."""
    devices = 0 if cpu else num_devices()
    on_cpu = devices == 0
    most = usable_cores() if on_cpu else devices
    skipped: list[Skipped] = []
    speeds = [("safe", ()), ("max", ("--speed", "max"))]
    first = 1 if on_cpu else devices  # as echelon launch chooses
    numbers = [first, *(n for n in dict.fromkeys((1, 2, most)) if n != first and n <= most)]
    if most == 1:
        skipped.append(
            Skipped(
                name=_("2 processes"),
                reason=_("this machine has one core") if on_cpu else _("there is one accelerator"),
            )
        )
    if not has_bf16(cpu=on_cpu):
        skipped.append(Skipped(name="bf16 autocast", reason=_("this device does not compute bf16 natively")))
    tried = [_candidate(number, name, flags, on_cpu=on_cpu) for number in numbers for name, flags in speeds]
    if on_cpu and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        skipped.append(Skipped(name="torch.compile", reason=_("there is no C++ compiler")))
    else:
        flags = ("--speed", "max", "--dynamo_backend", "inductor", "--dynamo_use_regional_compilation")
        tried.append(_candidate(first, "max, torch.compile", flags, on_cpu=on_cpu))
    return tried, skipped


def _candidate(number: int, name: str, flags: tuple[str, ...], *, on_cpu: bool) -> Candidate:
    given = ("--num_processes", str(number), *flags)
    name = _("{number} process{es}, {name}", number=number, es="es" if number > 1 else "", name=name)
    return Candidate(name=name, flags=(*(("--cpu",) if on_cpu else ()), *given), num_processes=number)
