"""Turns click's errors into echelon's: what is wrong, in which command, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from types import MappingProxyType

import click

from echelon.base.errors import UsageError
from echelon.cli.help.pages import spelled

# Flags of mpirun and srun, which resemble no flag of echelon launch.
_OF_OTHER_LAUNCHERS = MappingProxyType({"-n": "--num_processes", "-N": "--num_machines"})
# Flags of echelon launch that other commands do not need, or have under another name.
_NUM_PROCESSES = ("--num_processes", "--nproc_per_node", "-n")
_OF_LAUNCH = MappingProxyType(
    {
        ("echelon verify", "--cpu"): "leave it out: echelon verify always uses the CPU",
        **{("echelon verify", name): "did you mean --procs?" for name in _NUM_PROCESSES},
        **{
            ("echelon tune", name): "leave it out: echelon tune tries several numbers of processes"
            for name in _NUM_PROCESSES
        },
    }
)


def unknown_command(name: str, *, path: str, names: Sequence[str]) -> UsageError:
    """Return the error for a command that ``path`` does not have, with the nearest name."""
    near = get_close_matches(name, names, n=1)
    words = f"{path} {near[0]}".removeprefix("echelon ") if near else ""
    do = f"did you mean echelon {words}?" if near else f"commands: {', '.join(names)}"
    return UsageError(f"unknown command {name!r}", where=path, do=do)


def explain_click_error(
    error: click.ClickException, *, path: str, command: click.Command, argv: Sequence[str]
) -> UsageError:
    """Return ``error`` as an error of echelon."""
    page = f"see {path} --help"
    if isinstance(error, click.NoSuchOption):
        near = error.possibilities
        typed = (token.partition("=")[0] for token in argv)  # click reports the normalized name
        name = next((flag for flag in typed if flag.replace("_", "-") == error.option_name), error.option_name)
        meant = (
            _OF_OTHER_LAUNCHERS.get(name) if any("--num-processes" in param.opts for param in command.params) else None
        )
        meant = meant or (spelled(near[0]) if near else None)
        do = f"did you mean {meant}?" if meant else page
        return UsageError(f"unknown flag {name}", where=path, do=_OF_LAUNCH.get((path, spelled(name)), do))
    text = error.format_message().strip()
    if isinstance(command, click.Group) and (match := re.match(r"No such command '(.+?)'", text)):
        names = command.list_commands(click.Context(command))
        return unknown_command(match[1], path=path, names=names)
    if isinstance(error, click.BadParameter) and error.param is not None and error.param.opts:
        found = _bad_value(error, error.param)
        if found is not None:
            what, do = found
            return UsageError(what, where=path, do=do)
    if match := re.fullmatch(r"Option '(.+?)' requires (?:an argument|\d+ arguments)\.", text):
        return UsageError(f"{spelled(match[1])} needs a value", where=path, do=page)
    if match := re.fullmatch(r"Option '(.+?)' does not take a value\.", text):
        return UsageError(f"{spelled(match[1])} takes no value", where=path, do=f"write {spelled(match[1])} alone")
    if match := re.fullmatch(r"Got unexpected extra arguments? \((.+)\)", text):
        return UsageError(f"unexpected argument {match[1]}", where=path, do=page)
    flags = {name for param in command.params for name in param.opts}
    text = re.sub(r"--[\w-]+", lambda flag: spelled(flag[0]) if flag[0] in flags else flag[0], text.rstrip("."))
    return UsageError(text[:1].lower() + text[1:], where=path, do=page)


def _bad_value(error: click.BadParameter, param: click.Parameter) -> tuple[str, str] | None:
    """Return what is wrong with the value of a parameter, and what to do; None for other errors."""
    name = spelled(max(param.opts, key=len)) if isinstance(param, click.Option) else param.human_readable_name
    kind, message = param.type, error.message.rstrip(".")
    if isinstance(kind, click.Choice) and (match := re.match(r"'(.*)' is not one of ", message)):
        names = [str(one) for one in kind.choices]
        near = get_close_matches(match[1], names, n=1)
        return f"{name}='{match[1]}' is not one of {', '.join(names)}", (
            f"did you mean {near[0]}?" if near else "use one of these"
        )
    is_whole = isinstance(kind, click.types.IntParamType)
    if match := re.fullmatch(r"'(.*)' is not a valid (?:integer|int|float|integer range|float range)", message):
        if is_whole:
            return f"{name}='{match[1]}' is not an integer", "set it to an integer"
        return f"{name}='{match[1]}' is not a number", "set it to a number"
    if isinstance(kind, (click.IntRange, click.FloatRange)) and (
        match := re.match(r"(\S+) is not in the range ", message)
    ):
        if kind.max is not None and float(match[1]) >= kind.max:
            return f"{name}={match[1]} is above {kind.max}", f"set it to an integer of at most {kind.max}"
        number = "an integer" if is_whole else "a number"
        return f"{name}={match[1]} is below {kind.min}", f"set it to {number} of at least {kind.min}"
    return None
