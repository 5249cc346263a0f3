"""Detects ``echelon launch`` flags that were typed after the script and are therefore passed to the script."""

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

    A script may define flags with the same names. Before the run, the note therefore lists only flags that few scripts
    define, and only if the script's file does not contain their names. After a usage error in the script, it lists all flags.

    Args:
        ctx: the parsed command line.
        script: the script and its arguments.
        typed: parameters given before the script.
        failed: whether the script exited with code 2, as argparse and click do for unknown arguments.
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
        f"{flags} after the script {was} passed to {script.target}, not to the launcher; put launcher flags "
        f"before the script: echelon launch {found[0]} ... {script.target}"
    )


def _may_read(script: Script, flag: str) -> bool:
    """Return whether the script may define a flag with this name."""
    if script.kind != "script":
        return True
    words = re.split("[-_]", flag.lstrip("-"))
    return re.search("[-_]".join(words), Path(script.target).read_text(encoding="utf-8", errors="replace")) is not None
