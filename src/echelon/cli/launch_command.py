"""``launch_command_parser`` and ``launch_command``: ``echelon launch`` for programs that start it from Python, as trl's command line does."""

from __future__ import annotations

import argparse
from typing import Any

import click

from echelon.cli import launch
from echelon.cli.main import main

__all__ = ["launch_command", "launch_command_parser"]


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of the arguments of ``echelon launch``, for ``launch_command``.

    Args:
        subparsers: result of ``add_subparsers`` to which the parser is added as ``launch``.
    """
    create = argparse.ArgumentParser if subparsers is None else subparsers.add_parser
    parser: argparse.ArgumentParser = create(
        "launch", description="The flags are those of echelon launch, whose --help describes them.", allow_abbrev=False
    )
    for option in _options():
        names = [*option.opts, *(f"--{name[2:].replace('-', '_')}" for name in option.opts if name.startswith("--"))]
        action: dict[str, Any] = {"action": "store_true"} if option.is_flag else {}
        parser.add_argument(*dict.fromkeys(names), dest=option.name, default=None, **action)
    parser.add_argument("training_script", metavar="SCRIPT")
    parser.add_argument("training_script_args", metavar="ARGS", nargs=argparse.REMAINDER)
    parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run ``echelon launch`` with the result of the parser, which may have been changed since.

    Raises:
        SystemExit: the run failed; its code is that of the script.
    """
    argv = ["launch"]
    for option in _options():
        value = getattr(args, option.name or "", None)
        if value is None or value is False:
            continue
        name = max(option.opts, key=len)
        argv += [name] if option.is_flag else [f"{name}={value}"]
    try:
        main([*argv, args.training_script, *args.training_script_args])
    except SystemExit as end:
        if end.code:
            raise


def _options() -> list[click.Option]:
    return [one for one in launch.command.params if isinstance(one, click.Option) and one.name != "help"]
