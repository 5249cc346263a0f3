"""Sections of RESULTS.md: how they are written, and the machine and versions that each of them names."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def publish(section: str, *, is_written: bool) -> None:
    """Print ``section``; if ``is_written``, also replace the section of RESULTS.md that has the same heading by it."""
    print(section)
    if not is_written:
        return
    text = RESULTS.read_text()
    before, _, rest = text.partition(section.partition("\n")[0] + "\n")
    end = rest.find("\n## ")
    after = rest[end + 1 :] if end >= 0 else ""
    RESULTS.write_text(before.rstrip() + "\n\n" + section + ("\n" + after if after else ""))


def footer(command: str, *packages: str, needs_peers: bool = False) -> str:
    """Return when and with what a section was measured, and how to repeat it.

    Args:
        command: the arguments of Python.
        packages: packages whose versions are named, besides torch and echelon; those that are not installed are left out.
        needs_peers: whether the program needs the environment with other libraries.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages, "echelon") if installed(name))
    load = f"load {os.getloadavg()[0]:.0f}"
    how = "`make peers`, then `.venv-peers/bin/python " if needs_peers else "`.venv/bin/python "
    return (
        f"{date.today()}, {processor()}, {load}, Python {platform.python_version()}; {versions}.\n"
        f"Repeat: {how}benchmarks/{command} --write`.\n"
    )


def processor() -> str:
    """Return the name of the CPU and its number of cores."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def installed(package: str) -> bool:
    """Return whether a package is installed."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def verdict(holds: bool) -> str:
    """Return whether a target was met, in a word."""
    return "met" if holds else "missed"


def middle_half(values: Sequence[float], digits: int = 3) -> str:
    """Return the median of ``values``, with the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.{digits}f} - {high:.{digits}f})"
