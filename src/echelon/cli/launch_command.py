"""Lets Python programs, such as trl's command line, run ``echelon launch``: ``launch_command_parser`` and ``launch_command``."""

from __future__ import annotations

import argparse
from typing import Any

import click

from echelon.cli import launch
from echelon.cli.main import main


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return an argument parser for ``echelon launch``, for use with ``launch_command``.

    Args:
        subparsers: result of ``add_subparsers``. If given, the parser is added to it as ``launch``.
    """
    create = argparse.ArgumentParser if subparsers is None else subparsers.add_parser
    parser: argparse.ArgumentParser = create(
        "launch", description="Accepts the flags of echelon launch; see echelon launch --help.", allow_abbrev=False
    )
    for option in _options():
        names = [*option.opts, *(f"--{name[2:].replace('-', '_')}" for name in option.opts if name.startswith("--"))]
        action: dict[str, Any] = {
            "action": "store_true" if option.is_flag else "append" if option.multiple else "store"
        }
        parser.add_argument(*dict.fromkeys(names), dest=option.name, default=None, **action)
    parser.add_argument("training_script", metavar="SCRIPT")
    parser.add_argument("training_script_args", metavar="ARGS", nargs=argparse.REMAINDER)
    parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run ``echelon launch`` with the parsed arguments, which may have been modified after parsing.

    Raises:
        SystemExit: the run failed. The exit code is the script's.
    """
    argv = ["launch"]
    for option in _options():
        value = getattr(args, option.name or "", None)
        if value is None or value is False:
            continue
        name = max(option.opts, key=len)
        values = value if option.multiple else [value]
        argv += [name] if option.is_flag else [f"{name}={one}" for one in values]
    try:
        main([*argv, args.training_script, *args.training_script_args])
    except SystemExit as end:
        if end.code:
            raise


def _options() -> list[click.Option]:
    return [one for one in launch.command.params if isinstance(one, click.Option) and one.expose_value]
