"""``echelon tune``: tries settings on a script on this machine, and prints the one that is fastest."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from echelon.base.errors import UsageError
from echelon.base.messages.terminal import align_columns, say
from echelon.base.messages.translation import gettext as _
from echelon.base.similar_path import suggest_path
from echelon.cli.help.completion import complete_paths
from echelon.cli.stoppable import stoppable
from echelon.launch.script import Script, check
from echelon.status.strict_json import dumps

if TYPE_CHECKING:  # they import numpy or torch
    from echelon.tune.candidates import Candidate, Skipped
    from echelon.tune.measure import TriedRun

_LEAST_GAIN = 1.05
"""A setting that is less than 5 % faster is not recommended: runs differ by as much."""


@click.command("tune", context_settings={"allow_interspersed_args": False})
@click.option(
    "--seconds",
    metavar="N",
    type=click.FloatRange(min=1.0),
    default=30.0,
    help="Time for each setting, from its first step on (default: 30).",
)
@click.option("--cpu", is_flag=True, help="Use the CPU even if accelerators are available.")
@click.option("--json", "json", is_flag=True, help="Print JSON.")
@click.argument("script", metavar="SCRIPT", shell_complete=complete_paths)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=complete_paths)
@click.pass_context
def command(ctx: click.Context, script: str, args: tuple[str, ...], *, seconds: float, cpu: bool, json: bool) -> None:
    """Find the fastest settings for SCRIPT on this machine: numbers of processes, speed=, and torch.compile.

    Runs SCRIPT, unchanged and with its arguments, for some seconds with each setting, and measures optimizer steps, memory and loss.
    The script must use echelon's Accelerator or Trainer. It writes the files that it always writes, so pass arguments that
    make it write to a temporary folder.
    """
    if not Path(script).is_file():
        raise UsageError(
            _("{script} is not a file", script=script),
            where="SCRIPT",
            do=suggest_path(script, otherwise=_("pass the path of a Python script")),
        )
    check(Script(kind="script", target=script, args=()))
    from echelon.tune.candidates import candidates  # noqa: PLC0415 - torch and numpy, which --help does not need

    tried, skipped = candidates(cpu=cpu)
    folder = Path(tempfile.mkdtemp(prefix="echelon-tune-"))
    try:
        with stoppable(ctx):
            found = _measure_all(tried, script, args, seconds=seconds, folder=folder, is_shown=not json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    best = _best(found)
    _print(found, skipped, best, script, args) if not json else click.echo(dumps(_json(found, skipped, best)))
    ctx.exit(0 if best is not None else 2)


def _measure_all(
    tried: Sequence[Candidate], script: str, args: Sequence[str], *, seconds: float, folder: Path, is_shown: bool
) -> list[TriedRun]:
    from echelon.tune.measure import measure  # noqa: PLC0415 - numpy

    found = []
    is_terminal = sys.stderr.isatty()
    if is_shown and not is_terminal:
        say(_("trying {total} settings, {seconds:g} s each", total=len(tried), seconds=seconds))
    with tqdm(tried, desc="tune", unit="setting", disable=not (is_shown and is_terminal), file=sys.stderr) as bar:
        for number, candidate in enumerate(bar, 1):
            bar.set_postfix_str(candidate.name)
            one = measure(candidate, script, args, seconds=seconds, folder=folder / str(number))
            found.append(one)
            if is_shown and not is_terminal:
                result = one.failure or _("{number:.2f} ms per step", number=one.step_ms)
                say(
                    _(
                        "{number} of {total}: {name}: {result}",
                        number=number,
                        total=len(tried),
                        name=candidate.name,
                        result=result,
                    )
                )
    return found


def _best(found: Sequence[TriedRun]) -> TriedRun | None:
    """Return the fastest setting; the default if none is clearly faster; None if nothing could be measured."""
    measured = [one for one in found if not one.failure]
    if not measured:
        return None
    fastest = max(measured, key=_rate)
    default = found[0]
    return default if not default.failure and _rate(fastest) < _LEAST_GAIN * _rate(default) else fastest


def _rate(one: TriedRun) -> float:
    return (
        one.samples_per_s if one.samples_per_s > 0 else 1e3 / one.step_ms
    )  # samples are unknown if the loader is not prepared


def _print(
    found: Sequence[TriedRun], skipped: Sequence[Skipped], best: TriedRun | None, script: str, args: Sequence[str]
) -> None:
    from echelon.tune.measure import relative_loss  # noqa: PLC0415 - numpy

    rows = [(_("setting"), _("step"), _("samples/s"), _("faster"), _("memory"), _("loss differs"))]
    default = found[0]
    for one in found:
        name = one.candidate.name
        if one.failure:
            rows.append((name, "-", "-", "-", "-", one.failure))
            continue
        difference = relative_loss(one, default)
        gain = "-" if default.failure else f"{_rate(one) / _rate(default):.2f}x"
        loss = _("other batches") if difference is None else f"{difference:.1%}"
        rate = f"{one.samples_per_s:,.0f}" if one.samples_per_s > 0 else "-"
        memory = "-" if math.isnan(one.memory_mb) else f"{one.memory_mb:,.0f} MB"
        rows.append((name, f"{one.step_ms:.2f} ms", rate, gain, memory, loss))
    for line in align_columns(rows):
        click.echo(line)
    for left in skipped:
        click.echo(_("not tried: {left}, because {reason}", left=left.name, reason=left.reason))
    if best is None:
        say(_("no setting could be measured"))
    elif best is default:
        click.echo(_("the default is the fastest, or as fast as any other"))
    else:
        command = shlex.join(["echelon", "launch", *best.candidate.flags, script, *args])
        click.echo(_("fastest: {command}", command=command))


def _json(found: Sequence[TriedRun], skipped: Sequence[Skipped], best: TriedRun | None) -> dict[str, Any]:
    from echelon.tune.measure import relative_loss  # noqa: PLC0415 - numpy

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "settings": [
            {
                "name": one.candidate.name,
                "flags": list(one.candidate.flags),
                "step_ms": number(one.step_ms),
                "samples_per_s": number(one.samples_per_s),
                "memory_mb": number(one.memory_mb),
                "num_steps": one.num_steps,
                "relative_loss": relative_loss(one, found[0]),
                "failure": one.failure or None,
            }
            for one in found
        ],
        "skipped": [{"name": one.name, "reason": one.reason} for one in skipped],
        "best": None if best is None else best.candidate.name,
    }
