"""Detects ``echelon launch`` flags that were typed after the script and are therefore passed to the script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import click

from echelon.base.messages.translation import gettext as _
from echelon.cli.launch_options import PROCESS_FLAGS
from echelon.launch.script import Script

# Parsers that take their flags from classes and functions, whose fields may be defined in other packages.
_CLASS_PARSERS = re.compile(
    r"\b(?:HfArgumentParser|TrlParser|jsonargparse|LightningCLI|simple_parsing|draccus|tyro|fire|hydra|typer)\b"
)
# Imports of a function that runs the program or reads its arguments, from a package whose source is not read here.
_DELEGATED = re.compile(
    r"^\s*from\s+(?!(?:echelon|torch|transformers|accelerate)\b)\S+\s+import\b.*"
    r"\b(?:main|cli|app|run\w*|train|parse\w*|\w*(?:args|arguments|options|flags|parser))\b",
    re.MULTILINE | re.IGNORECASE,
)
_IMPORTED = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)


def note_about_flags(ctx: click.Context, script: Script, *, typed: Mapping[str, str], failed: bool) -> str | None:
    """Return a note about misplaced flags, or None.

    A script may define flags with the same names. Before the run, the note therefore lists only flags that the script does not
    seem to define. After a usage error in the script, it lists all flags.

    Args:
        failed: whether the script exited with code 2, as argparse and click do for unknown arguments.
    """
    flags = {
        opt: p for p in ctx.command.params if isinstance(p, click.Option) for opt in p.opts if opt.startswith("--")
    }
    found: list[str] = []
    for argument in script.args:
        if argument == "--":
            break
        flag = argument.partition("=")[0]
        option = flags.get(flag.replace("_", "-"))
        if option is None or option.name in typed:
            continue
        is_launchers = option.name in PROCESS_FLAGS and not _may_read(script, flag)
        is_other = option.is_flag and "=" in argument  # the launcher's flag takes no value
        if failed or is_launchers or (not is_other and not _may_define(script, flag)):
            found.append(flag)
    if not found:
        return None
    names, was = ", ".join(found), "was" if len(found) == 1 else "were"
    return _(
        "{names} after the script {verb} passed to {target}, not to the launcher; put launcher flags before "
        "the script: echelon launch {flag} ... {target}",
        names=names,
        verb=was,
        target=script.target,
        flag=found[0],
    )


def _may_read(script: Script, flag: str) -> bool:
    """Return whether the script may define a flag with this name, which few scripts contain for another reason."""
    if script.kind != "script":
        return True
    words = re.split("[-_]", flag.lstrip("-"))
    return re.search("[-_]".join(words), _text(Path(script.target))) is not None


def _may_define(script: Script, flag: str) -> bool:
    """Return whether the script, or a module beside it that it imports, may define a flag whose name is a common word."""
    if script.kind != "script":
        return True
    path = Path(script.target)
    source = _text(path)
    beside = (path.parent / f"{name}.py" for name in set(_IMPORTED.findall(source)))
    texts = [source, *(_text(module) for module in beside if module.is_file())]
    if any(_CLASS_PARSERS.search(text) for text in texts) or _DELEGATED.search(source):
        return True
    name = "[-_]".join(re.split("[-_]", flag.lstrip("-")))
    # `--cpu`; absl's DEFINE_bool("cpu"); a field of a class of arguments; flags composed in a loop
    defined = re.compile(
        rf"--{name}\b|\bDEFINE_\w+\(\s*['\"]{name}['\"]|^\s+{name}\s*:|['\"]--(?:\{{|['\"]\s*\+)", re.MULTILINE
    )
    return any(map(defined.search, texts))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
