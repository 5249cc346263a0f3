"""Turns click's errors into echelon's: what is wrong, in which command, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from types import MappingProxyType

import click

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.cli.help.pages import spelled

# Flags of mpirun and srun, which resemble no flag of echelon launch.
_OF_OTHER_LAUNCHERS = MappingProxyType({"-n": "--num_processes", "-N": "--num_machines"})
# Flags of echelon launch that other commands do not need, or have under another name.
_NUM_PROCESSES = ("--num_processes", "--nproc_per_node", "-n")
_OF_LAUNCH = MappingProxyType(
    {
        ("echelon verify", "--cpu"): N_("leave it out: echelon verify always uses the CPU"),
        **{("echelon verify", name): N_("did you mean --num_processes?") for name in _NUM_PROCESSES},
        **{
            ("echelon tune", name): N_("leave it out: echelon tune tries several numbers of processes")
            for name in _NUM_PROCESSES
        },
    }
)


def unknown_command(name: str, *, path: str, names: Sequence[str]) -> UsageError:
    """Return the error for a command that ``path`` does not have, with the nearest name."""
    near = get_close_matches(name, names, n=1)
    words = f"{path} {near[0]}".removeprefix("echelon ") if near else ""
    if not near and path == "echelon" and name.endswith(".py"):
        words = f"launch {name}"
    do = _("did you mean echelon {words}?", words=words) if words else _("commands: {names}", names=", ".join(names))
    return UsageError(_("unknown command {name!r}", name=name), where=path, do=do)


def explain_click_error(
    error: click.ClickException, *, path: str, command: click.Command, argv: Sequence[str]
) -> UsageError:
    """Return ``error`` as an error of echelon."""
    page = _("see {path} --help", path=path)
    if isinstance(error, click.NoSuchOption):
        # Of click's suggestions, those that a typing error explains.
        near = get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=0.75)
        typed = (token.partition("=")[0] for token in argv)  # click reports the normalized name
        name = next((flag for flag in typed if flag.replace("_", "-") == error.option_name), error.option_name)
        meant = (
            _OF_OTHER_LAUNCHERS.get(name) if any("--num-processes" in param.opts for param in command.params) else None
        )
        meant = meant or (spelled(near[0]) if near else None)
        do = _("did you mean {meant}?", meant=meant) if meant else page
        if path == "echelon launch" and not meant:
            do = _(
                "flags of your script come after its name: echelon launch [FLAGS] SCRIPT {name}; {page}",
                name=name,
                page=page,
            )
        if path == "echelon" and not meant:
            do = _("flags follow a command, as in echelon launch {name}", name=name)
        return UsageError(
            _("unknown flag {name}", name=name), where=path, do=_(_OF_LAUNCH.get((path, spelled(name)), do))
        )
    text = error.format_message().strip()
    if isinstance(command, click.Group) and (match := re.match(r"No such command '(.+?)'", text)):
        names = command.list_commands(click.Context(command))
        return unknown_command(match[1], path=path, names=names)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return _missing(error.param, path=path, command=command, argv=argv)
    if isinstance(error, click.BadParameter) and error.param is not None and error.param.opts:
        found = _bad_value(error, error.param)
        if found is not None:
            what, do = found
            return UsageError(what, where=path, do=do)
    if match := re.fullmatch(r"Option '(.+?)' requires (?:an argument|\d+ arguments)\.", text):
        return UsageError(_("{flag} needs a value", flag=spelled(match[1])), where=path, do=page)
    if match := re.fullmatch(r"Option '(.+?)' does not take a value\.", text):
        return UsageError(
            _("{flag} takes no value", flag=spelled(match[1])),
            where=path,
            do=_("write {flag} alone", flag=spelled(match[1])),
        )
    if match := re.fullmatch(r"Got unexpected extra arguments? \((.+)\)", text):
        return UsageError(_("unexpected argument {words}", words=match[1]), where=path, do=page)
    flags = {name for param in command.params for name in param.opts}
    text = re.sub(r"--[\w-]+", lambda flag: spelled(flag[0]) if flag[0] in flags else flag[0], text.rstrip("."))
    return UsageError(text[:1].lower() + text[1:], where=path, do=page)


def _missing(param: click.Parameter, *, path: str, command: click.Command, argv: Sequence[str]) -> UsageError:
    """Return the error for a required argument or option that is missing."""
    name = spelled(max(param.opts, key=len)) if isinstance(param, click.Option) else param.human_readable_name
    what = _("{name} is missing", name=name)
    if isinstance(param, click.Option):
        choices = param.type.choices if isinstance(param.type, click.Choice) else ()
        values = "|".join(map(str, choices)) or param.metavar or "VALUE"
        return UsageError(what, where=path, do=_("add {name} {values}", name=name, values=values))
    flag, last = argv[-2:] if len(argv) > 1 else ("", "")
    if flag.startswith("-") and "=" not in flag and last.endswith(".py"):
        text = _("{flag} took {value} as its value; write {flag} VALUE {value}", flag=flag, value=last)
        return UsageError(what, where=path, do=text)
    pieces = " ".join(command.collect_usage_pieces(click.Context(command)))
    return UsageError(what, where=path, do=_("write {usage}", usage=f"{path} {pieces}"))


def _bad_value(error: click.BadParameter, param: click.Parameter) -> tuple[str, str] | None:
    """Return what is wrong with the value of a parameter, and what to do; None for other errors."""
    name = spelled(max(param.opts, key=len)) if isinstance(param, click.Option) else param.human_readable_name
    kind, message = param.type, error.message.rstrip(".")
    if isinstance(kind, click.Choice) and (match := re.match(r"'(.*)' is not one of ", message)):
        names = [str(one) for one in kind.choices]
        near = get_close_matches(match[1], names, n=1)
        what = _("{name}='{value}' is not one of {names}", name=name, value=match[1], names=", ".join(names))
        return what, (_("did you mean {near}?", near=near[0]) if near else _("use one of these"))
    is_whole = isinstance(kind, click.types.IntParamType)
    if match := re.fullmatch(r"'(.*)' is not a valid (?:integer|int|float|integer range|float range)", message):
        if is_whole:
            return _("{name}='{value}' is not an integer", name=name, value=match[1]), _("set it to an integer")
        return _("{name}='{value}' is not a number", name=name, value=match[1]), _("set it to a number")
    if isinstance(kind, (click.IntRange, click.FloatRange)) and (
        match := re.match(r"(\S+) is not in the range ", message)
    ):
        if kind.max is not None and float(match[1]) >= kind.max:
            return _("{name}={value} is above {most}", name=name, value=match[1], most=kind.max), _(
                "set it to an integer of at most {most}", most=kind.max
            )
        kind_name = _("an integer") if is_whole else _("a number")
        return _("{name}={value} is below {least}", name=name, value=match[1], least=kind.min), _(
            "set it to {kind} of at least {least}", kind=kind_name, least=kind.min
        )
    return None
