"""Detects flags of ``echelon launch`` that stand after the script and therefore belong to the script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import click

from echelon.cli.launch_options import PROCESS_FLAGS
from echelon.launch.script import Script

__all__ = ["note_about_flags"]


def note_about_flags(ctx: click.Context, script: Script, *, typed: Mapping[str, str], failed: bool) -> str | None:
    """Return a note about misplaced flags, or None.

    A script may have flags of the same names. Therefore only flags that hardly any script has are noted before the start, and
    only if the script's file does not contain their names. After a usage error of the script, all flags are noted.

    Args:
        ctx: the parsed command line.
        script: the script with its arguments.
        typed: names of the flags before the script.
        failed: whether the script has ended with exit code 2, that of argparse and click for unknown arguments.
    """
    names = {opt: p.name for p in ctx.command.params for opt in p.opts if p.name is not None and opt.startswith("--")}
    found: list[str] = []
    for argument in script.args:
        if argument == "--":
            break
        flag = argument.partition("=")[0]
        name = names.get(flag.replace("_", "-"))
        if name is None or name in typed:
            continue
        if failed or (name in PROCESS_FLAGS and not _may_read(script, flag)):
            found.append(flag)
    if not found:
        return None
    flags, was = ", ".join(found), "was" if len(found) == 1 else "were"
    return (
        f"{flags} after the script {was} passed to {script.target}, not to the launcher; the launcher's flags go before the "
        f"script: echelon launch {found[0]} ... {script.target}"
    )


def _may_read(script: Script, flag: str) -> bool:
    """Return whether the script may have a flag of this name."""
    if script.kind != "script":
        return True
    words = re.split("[-_]", flag.lstrip("-"))
    return re.search("[-_]".join(words), Path(script.target).read_text(encoding="utf-8", errors="replace")) is not None
