"""``echelon verify``: runs a script on several layouts, and shows whether each is the same run as one process."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from echelon.base.cores import usable_cores
from echelon.base.errors import UsageError
from echelon.base.messages.terminal import has_colour, say
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.printable import printable
from echelon.base.similar_path import suggest_path
from echelon.cli.help.completion import complete_folders, complete_paths
from echelon.cli.help.pages import option_name, write_groups
from echelon.cli.launch_options import flag_entries, option_row
from echelon.cli.stoppable import stoppable
from echelon.launch.interrupts import Interrupts
from echelon.launch.script import Script, check
from echelon.status.strict_json import dumps

if TYPE_CHECKING:  # these import torch
    from echelon.verify.command.run_layouts import LayoutRun, RunRequest
    from echelon.verify.command.verification import Verification, VerifyPlan

GROUPS = MappingProxyType(
    {
        "Layouts": ("procs", "engines"),
        "Run": ("steps", "seed", "timeout", "libraries"),
        "Reference (default: the same script on one process)": ("against", "against_run"),
        "Resume": ("resume_after", "resume_args"),
        "Output": ("html", "json", "keep"),
        "Help": ("help",),
    }
)
"""Heading of ``--help`` -> the parameters below it."""
_EXAMPLES = (
    ("echelon verify train.py --lr 0.1", N_("Is training on two processes the same as on one?")),
    ("echelon verify --num_processes 1,2,4 --engines ddp,zero1,fsdp2 train.py", N_("The same for other layouts:")),
    (
        "echelon verify --against plain.py ddp.py",
        N_("Is a script with DistributedDataParallel the same as a plain one?"),
    ),
)
_LAYOUT_FLAGS = frozenset({"--num-processes", "--procs", "--engines"})
_MAX_WIDTH = 110
_PIPE_WIDTH = 100


class VerifyCommand(click.Command):
    """Command whose flags may also follow the script: from the first of ``_LAYOUT_FLAGS`` on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move flags behind the script's arguments to the front."""
        start = sum(map(len, flag_entries(args, self.params)))
        later = (i for i, word in enumerate(args) if i > start and _flag(word) in _LAYOUT_FLAGS)
        end = next(later, len(args))
        return super().parse_args(ctx, [*args[end:], *args[:end]])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups, and examples."""
        options = {option_name(one): one for one in self.get_params(ctx) if isinstance(one, click.Option)}
        groups = {heading: [option_row(options[name], "", ctx) for name in names] for heading, names in GROUPS.items()}
        write_groups(formatter, groups, _EXAMPLES)


def _flag(word: str) -> str:
    """Return the flag in a word of the command line, as click compares it."""
    return word.partition("=")[0].replace("_", "-")


@click.command("verify", cls=VerifyCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--num-processes", "--procs", "procs", metavar="N,N,...", default="1,2", help="Numbers of processes (default: 1,2)."
)
@click.option(
    "--engines",
    "--engine",
    "engines",
    metavar="NAMES",
    help="Engines to run with each number of processes, such as ddp,zero1,fsdp2 (default: the one that the script and its "
    "settings choose). Scripts that do not use echelon's Accelerator or Trainer ignore the engine.",
)
@click.option(
    "--steps", metavar="N", type=click.IntRange(min=1), default=20, help="Number of optimizer steps (default: 20)."
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Seed of all random number generators when the script starts; rank R gets N + R (default: 0).",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=1.0),
    default=600.0,
    help="Time after which a run is stopped; its ranks' positions are shown (default: 600).",
)
@click.option(
    "--as",
    "libraries",
    metavar="LIBRARIES",
    help="Libraries that echelon replaces, as with echelon launch: 'accelerate' or 'accelerate,transformers'.",
)
@click.option(
    "--against", metavar="SCRIPT", help="Compare with this script on one process.", shell_complete=complete_paths
)
@click.option(
    "--against_run",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Compare with a run on one process that --keep recorded in DIR.",
    shell_complete=complete_folders,
)
@click.option(
    "--resume_after",
    metavar="N",
    type=click.IntRange(min=1),
    help="End each layout after N steps and start the script again; together they must be the same as one run.",
)
@click.option(
    "--resume_args",
    metavar="ARGS",
    default="",
    help="Arguments with which the script is started again, in one string (default: the same arguments).",
)
@click.option(
    "--html", metavar="FILE", help="Write a page with a row for each step and a column for each stage.",
    shell_complete=complete_paths,
)  # fmt: skip
@click.option("--json", "json", is_flag=True, help="Print JSON.")
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Keep the recorded steps and the output of all runs in DIR (default: a temporary folder).",
    shell_complete=complete_folders,
)
@click.argument("script", metavar="SCRIPT", shell_complete=complete_paths)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=complete_paths)
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> None:
    """Show whether SCRIPT on several processes is the same run as on one, and if not, where they first differ.

    Runs SCRIPT unchanged on the CPU for some steps, on one process and on each layout, and compares every step: samples,
    outputs, loss, gradients, clipping, learning rates, weights, optimizer state, buffers and random number generators.
    The reference run is one process with the samples of all ranks in each step. It is also run in float64, which measures its rounding
    errors, and, if a difference may be rounding, four more times with weights and gradients changed by rounding errors ("rounding check 1/4"). The
    bounds for rounding errors follow from these runs.

    All arguments after SCRIPT are passed to the script, up to --num_processes or --engines. {layout} in an argument becomes the name of
    the layout. Exit codes: 0 if all layouts are the same run, 1 if one differs, 2 if one could not be run or compared.
    """
    _check(script, flags)
    folder = Path(tempfile.mkdtemp(prefix="echelon-verify-")) if flags["keep"] is None else _empty(flags["keep"])
    is_needed = flags["keep"] is not None
    try:
        with stoppable(ctx) as interrupts, closing(_Bars(is_shown=not flags["json"])) as bars:
            interrupts.hold()
            plan = _plan(script, args, flags, folder)
            found = _verify(plan, flags, interrupts, bars)
        is_needed |= found.reference_failure is not None or any(one.failure for one in found.layouts)
        _show(found, flags)
    finally:
        if not is_needed:
            shutil.rmtree(folder, ignore_errors=True)
    ctx.exit(found.exit_code)


def _check(script: str, flags: dict[str, Any]) -> None:
    """Raise an error for what can be seen before torch is imported."""
    for name, path in (("SCRIPT", script), ("--against", flags["against"])):
        if path is None:
            continue
        if not Path(path).is_file():
            do = suggest_path(path, otherwise=_("pass the path of a Python script"))
            raise UsageError(_("{path} is not a file", path=path), where=name, do=do)
        check(Script(kind="script", target=path, args=()))
    if wrong := [word for word in flags["procs"].split(",") if not word.strip().isdigit() or not int(word)]:
        raise UsageError(
            _("{value!r} is not a number of processes", value=wrong[0]),
            where=_("flag {name}", name="--num_processes"),
            do=_("pass positive integers, separated by commas, such as --num_processes 1,2,4"),
        )
    if flags["against"] is not None and flags["against_run"] is not None:
        raise UsageError(
            _("--against and --against_run are mutually exclusive"),
            where="flags --against, --against_run",
            do=_("remove one of them"),
        )
    after = flags["resume_after"]
    if after is not None and after >= flags["steps"]:
        raise UsageError(
            _(
                "the run ends after {steps} steps, before it could be resumed after step {after}",
                steps=flags["steps"],
                after=after,
            ),
            where="flag --resume_after",
            do=_("pass --steps {number}", number=2 * after),
        )
    if flags["resume_args"] and after is None:
        raise UsageError(
            _("--resume_args is set without --resume_after"), where="flag --resume_args", do=_("add --resume_after N")
        )


def _empty(folder: Path) -> Path:
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(_("{folder} is not empty", folder=folder), where="flag --keep", do=_("pass a new folder"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            _("cannot create {folder}: {strerror}", folder=folder, strerror=error.strerror),
            where="flag --keep",
            do=_("pass a folder that you can write"),
        ) from error
    return folder.resolve()


def _plan(script: str, args: tuple[str, ...], flags: dict[str, Any], folder: Path) -> VerifyPlan:
    from echelon.verify.command.layouts import parse_layouts  # noqa: PLC0415 - imports torch, as below
    from echelon.verify.command.verification import VerifyPlan  # noqa: PLC0415

    return VerifyPlan(
        script=script,
        arguments=args,
        layouts=tuple(parse_layouts(flags["procs"], flags["engines"])),
        steps=flags["steps"],
        folder=folder,
        against=flags["against"],
        against_run=flags["against_run"],
        resume_after=flags["resume_after"],
        resume_arguments=tuple(shlex.split(flags["resume_args"])),
    )


def _verify(plan: VerifyPlan, flags: dict[str, Any], interrupts: Interrupts, bars: _Bars) -> Verification:
    from echelon.launch.local.warm_start import WarmStarter  # noqa: PLC0415 - as above
    from echelon.verify.command.run_layouts import WARM_MODULES, LayoutRunner, RunLimits, run_environment  # noqa: PLC0415
    from echelon.verify.command.verification import verify  # noqa: PLC0415

    most = max(layout.num_processes for layout in plan.layouts)
    libraries = () if flags["libraries"] is None else ("--as", flags["libraries"])
    limits = RunLimits(
        seed=flags["seed"],
        timeout_s=flags["timeout"],
        num_threads=max(usable_cores() // most, 1),
        launch_flags=libraries,
    )
    with closing(WarmStarter()) as warm:
        # torch reads the number of threads when it is imported.
        warm.prepare({**run_environment(), "OMP_NUM_THREADS": str(limits.num_threads)}, WARM_MODULES)
        recorder = LayoutRunner(limits, interrupts, on_update=bars.show, warm=warm)

        def record(request: RunRequest) -> LayoutRun:
            run = recorder.record(request)
            bars.finish(run)
            return run

        return verify(plan, record)


def _show(found: Verification, flags: dict[str, Any]) -> None:
    if flags["html"] is not None:
        from echelon.verify.command.page import render_verification  # noqa: PLC0415

        path = Path(flags["html"])
        try:
            path.write_text(render_verification(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                _("cannot write {path}: {strerror}", path=path, strerror=error.strerror),
                where="flag --html",
                do=_("pass a file that you can write"),
            ) from error
    if flags["json"]:
        click.echo(dumps(found.as_json(), indent=2))
        return
    from echelon.verify.command.terminal_output import Palette, render  # noqa: PLC0415

    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) if sys.stdout.isatty() else _PIPE_WIDTH
    palette = Palette.for_terminal() if has_colour(sys.stdout) else Palette()
    click.echo(render(found, palette=palette, width=width), nl=False, color=True)
    if flags["html"] is not None:
        click.echo(f"\npage: {printable(flags['html'])}")


class _Bars:
    """A bar for each run, on a terminal; elsewhere, a line for each run that has ended."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._bar: tqdm[Any] | None = None
        self._name = ""

    def show(self, request: RunRequest, count: int) -> None:
        """Show that ``count`` updates of a run have been recorded."""
        if not self._is_shown:
            return
        if self._bar is None or self._name != request.name:
            self.close()
            self._name = request.name
            self._bar = tqdm(
                total=request.run.steps,
                desc=f"{request.name:<32}",
                leave=False,
                disable=None,  # where stderr is not a terminal
                bar_format="{desc} {bar:24} {n_fmt}/{total_fmt} updates {elapsed}",
            )
        self._bar.update(count - self._bar.n)
        self._bar.refresh()

    def finish(self, run: LayoutRun) -> None:
        """Print one line for a run that has ended, where no bar can be shown."""
        if not sys.stderr.isatty():
            ending = (
                "could not run" if run.failure is not None else _("{num_updates} updates", num_updates=run.num_updates)
            )
            say(f"{run.request.name}: {ending}, {run.seconds:.1f} s")

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
