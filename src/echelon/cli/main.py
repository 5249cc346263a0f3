"""The ``echelon`` command: runs a subcommand and prints errors as what / where / do."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from echelon._version import __version__
from echelon.base.errors import ConfigError, EchelonError, UsageError
from echelon.base.messages.terminal import has_colour, say
from echelon.base.messages.translation import gettext_noop as N_
from echelon.base.optional import explain_missing_torch
from echelon.cli.help.click_errors import explain_click_error, unknown_command
from echelon.cli.help.completion import words_normalized
from echelon.cli.help.pages import PageContext, page_colour, with_pages

# Name -> (module, help line). A module is imported when its command is used; `echelon --help` imports none of them.
_COMMANDS = {
    "checkpoint": ("echelon.cli.checkpoint", N_("List, verify, show, merge, export and import checkpoints.")),
    "completion": ("echelon.cli.help.completion", N_("Turn on completion with the Tab key in bash, zsh or fish.")),
    "config": ("echelon.cli.config", N_("Create, show, convert and compare settings, with the origin of each value.")),
    "doctor": ("echelon.cli.doctor", N_("Show why a run stalled or failed: the stack and errors of each rank.")),
    "env": ("echelon.cli.env", N_("Show versions, platform and devices, for bug reports.")),
    "estimate-memory": (
        "echelon.cli.estimate_memory",
        N_("Print the size of a model's weights in several dtypes, with accelerate's options."),
    ),
    "launch": ("echelon.cli.launch", N_("Run a script in one or more processes, on one or more machines.")),
    "merge-weights": (
        "echelon.cli.merge_weights",
        N_("Write a checkpoint's weights to one file, with accelerate's options."),
    ),
    "plan": ("echelon.cli.plan", N_("Say whether a training step fits into memory, and how to run it, without a GPU.")),
    "report": ("echelon.cli.report", N_("Write a page with plots of a run, or of several runs to compare.")),
    "runs": ("echelon.cli.runs", N_("List, show and compare recorded runs.")),
    "submit": ("echelon.cli.submit", N_("Submit a script as a Slurm or Kubernetes job.")),
    "test": (
        "echelon.cli.test",
        N_("Train a small model with multiple processes and compare the result with that of a single process."),
    ),
    "to-fsdp2": (
        "echelon.cli.to_fsdp2",
        N_("Convert the FSDP settings of a config file from version 1 to 2, with accelerate's options."),
    ),
    "token": ("echelon.cli.job_token", N_("Create the secret shared by the machines in a run.")),
    "tune": ("echelon.cli.tune", N_("Find the fastest settings for a script on this machine.")),
    "verify": ("echelon.cli.verify", N_("Show whether a script trains the same on several processes as on one.")),
    "watch": ("echelon.cli.watch", N_("Show what a run is doing: progress, rates, loss, and each rank.")),
}


# Only for those who know it from accelerate: echelon checkpoint merge does the same.
_HIDDEN = frozenset({"merge-weights"})


class _LazyGroup(click.Group):
    context_class = PageContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[cmd_name][0]).command
        return with_pages(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx) if name not in _HIDDEN])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].replace("_", "-") not in _COMMANDS and not args[0].startswith("-"):
            names = [name for name in self.list_commands(ctx) if name not in _HIDDEN]
            raise unknown_command(args[0], path="echelon", names=names)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Accept every flag as --num_processes and as --num-processes. Values are not normalized.
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "max_content_width": 110,
    },
)
@click.version_option(__version__, prog_name="echelon", message="%(prog)s %(version)s")
def cli() -> None:
    """Scale PyTorch training from one process to many."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit with 0 on success, 2 if the command line or a setting is invalid, else 1 or the script's code."""
    _open_closed_streams()
    sys.exit(_run(argv))


def _open_closed_streams() -> None:
    """Connect closed standard streams (``>&-``) to the null device, for this process and the ranks, which inherit them.

    Python has None for such a stream, and the next file or socket would get its number, and what is printed to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # gets the lowest number that is free
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _run(argv: Sequence[str] | None) -> int:
    try:
        with words_normalized():
            code = cli.main(args=argv, prog_name="echelon", standalone_mode=False, color=page_colour())
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error, err=True, color=has_colour(sys.stderr))
        return 2
    except click.ClickException as error:
        say(_from_click(error, sys.argv[1:] if argv is None else argv), kind="error")
        return 2
    except EchelonError as error:
        say(error, kind="error")
        return 2 if isinstance(error, (ConfigError, UsageError)) else 1
    except ModuleNotFoundError as error:
        explained = explain_missing_torch(error)
        if explained is error:
            raise
        say(explained, kind="error")
        return 1
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # echelon --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _from_click(error: click.ClickException, argv: Sequence[str]) -> UsageError:
    context = error.ctx if isinstance(error, click.UsageError) else None
    path, command = (context.command_path, context.command) if context else _command_of(argv)
    return explain_click_error(error, path=path, command=command, argv=argv)


def _command_of(argv: Sequence[str]) -> tuple[str, click.Command]:
    """Return the command that ``argv`` calls, with its path: click does not say where a flag's value is missing."""
    path, context = "echelon", click.Context(cli)
    found: click.Command = cli
    for word in argv:
        if not isinstance(found, click.Group):
            break
        name = word.replace("_", "-")
        below = found.get_command(context, name)
        if below is not None:
            path, found = f"{path} {name}", below
    return path, found


if __name__ == "__main__":
    main()
