"""``echelon completion``: completion of commands, flags, their values, runs and paths with the Tab key in bash, zsh and fish."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import click
from click.shell_completion import CompletionItem, get_completion_class

from echelon.base import environ
from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.status.run_files import DEFAULT_PARENT, INFO_FILE

VARIABLE = "_ECHELON_COMPLETE"
"""Environment variable with which the shell asks for completions; click derives it from the program's name."""

_LINES = MappingProxyType(
    {
        "bash": ("~/.bashrc", 'eval "$(echelon completion bash --script)"'),
        "zsh": ("~/.zshrc", 'eval "$(echelon completion zsh --script)"'),
        "fish": ("~/.config/fish/completions/echelon.fish", "echelon completion fish --script | source"),
    }
)


@click.command("completion")
@click.argument("shell", type=click.Choice(tuple(_LINES)))
@click.option("--script", is_flag=True, help="Print the whole script instead, for a file that the shell reads.")
@click.pass_context
def command(ctx: click.Context, shell: str, script: bool) -> None:
    """Print the line that turns on completion of commands and flags with the Tab key in SHELL: bash, zsh or fish."""
    if not script:
        file, line = _LINES[shell]
        click.echo(f"# {file}\n{line}")
        return
    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(_("click has no completion for {shell}", shell=shell), do=_("install click 8.1 or later"))
    click.echo(kind(ctx.find_root().command, {}, "echelon", VARIABLE).source())


@contextmanager
def words_normalized() -> Iterator[None]:
    """Write the flags that the shell asks about with ``-``, because click compares them as they were declared."""
    words = environ.get("COMP_WORDS") if environ.get(VARIABLE) else None
    if words is None:
        yield
        return
    # The last word is the one to complete.
    hyphenated = re.sub(r"(?<=\s)--[\w-]+(?==|\s)", lambda match: match[0].replace("_", "-"), words)
    with environ.patch({"COMP_WORDS": hyphenated}):
        yield


def complete_paths(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of files."""
    return [CompletionItem(incomplete, type="file")]


def complete_folders(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of folders."""
    return [CompletionItem(incomplete, type="dir")]


def complete_runs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of the runs in ./echelon-runs, the newest first; let the shell complete the names of other folders."""
    found = sorted((path.parent.name for path in Path(DEFAULT_PARENT).glob(f"*/{INFO_FILE}")), reverse=True)
    matching = [CompletionItem(name) for name in found if name.startswith(incomplete)]
    return matching or [CompletionItem(incomplete, type="dir")]


_ENGINES = ("single", "dp", "ddp", "zero1", "fsdp2", "deepspeed")


def complete_engines(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of engines, also of those in other packages. The registry itself would import torch."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - takes 10 ms to import

    names = dict.fromkeys((*_ENGINES, *(point.name for point in entry_points(group="echelon.engines"))))
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
