"""``echelon doctor RUN`` diagnoses a run; ``echelon doctor --nnodes N ...`` tests the connections between machines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.printable import printable
from echelon.cli.help.completion import complete_runs
from echelon.diagnose.stall import name_ranks
from echelon.launch.failures.failure import ErrorRecord
from echelon.launch.local.goodput_recorder import read_goodput
from echelon.launch.local.rank_errors import read_record
from echelon.launch.local.ranks import STALL_FILE
from echelon.launch.local.worker import ERROR_FILE
from echelon.report.run_folder import find_run, read_run
from echelon.status.run_files import event_text
from echelon.status.stack_reporter import ANSWER_FILE


@click.command("doctor", context_settings={"ignore_unknown_options": True})
@click.argument(
    "args", metavar="[RUN] | --nnodes N ...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_runs
)
@click.option("--all-threads", is_flag=True, help="Show all threads of each rank, not just the main thread.")
@click.pass_context
def command(ctx: click.Context, args: tuple[str, ...], all_threads: bool) -> None:
    """Diagnose a run, or test the connections between machines.

    RUN is the folder of a run, or a folder that contains runs, of which the newest is shown (default: ./echelon-runs). A stall
    report names the folder of its run. Shows where the time went, each rank's stack at each stall, each rank's errors and, while
    the run is live, what each rank is doing.

    To test connections, run this command on each machine with --nnodes and the other rendezvous flags of `echelon launch`. It
    shows which machines join, which are refused and why, and which are missing. It then measures the bandwidth between each
    pair of machines, using one process per machine.
    """
    if any(arg.replace("_", "-").partition("=")[0] in _MULTINODE_FLAGS for arg in args):
        ctx.exit(_test_machines(args))
    if len(args) > 1 or any(arg.startswith("-") for arg in args):
        raise UsageError(_("echelon doctor takes one run folder, or --nnodes N ..."), do=_("see echelon doctor --help"))
    _diagnose_run(find_run(*args), all_threads=all_threads)


_MULTINODE_FLAGS = ("--nnodes", "--num-machines", "--num-nodes")
_JOIN_S = 60


def _test_machines(args: tuple[str, ...]) -> int:
    conf = (
        []
        if any(arg.replace("_", "-").startswith("--rdzv-conf") for arg in args)
        else [f"--rdzv-conf=join_timeout={_JOIN_S}"]
    )
    rules = ["--nproc-per-node=1", "--stall-timeout=30", "--on-stall=stop", "--no-record"]
    argv = [*rules, *conf, *args, "-m", "echelon.testing.links"]
    from echelon.cli.main import cli  # noqa: PLC0415 - main imports this module

    code = cli.main(args=["launch", *argv], prog_name="echelon", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _diagnose_run(run: Path, *, all_threads: bool) -> None:
    attempts = sorted(run.glob("attempt_*"), key=_number)
    goodput = read_goodput(run)
    before = f"{printable(str(run))}: "
    for line in [] if goodput is None else goodput.lines():
        click.echo(before + printable(line))
        before = "  "
    is_empty = True
    failures = _failures(run)
    for attempt in attempts:
        for line in [
            *_stalls(attempt, all_threads=all_threads),
            *(f"{attempt.name}: {text}" for text in failures.get(_number(attempt), ())),
            *_errors(attempt),
        ]:
            is_empty = False
            click.echo(printable(line))
    if is_empty:
        click.echo(before + _("no rank has stalled or failed"))
    for line in _live_ranks(run):
        click.echo(printable(line))


def _failures(run: Path) -> dict[int, list[str]]:
    """Return, for each attempt, which rank failed first and how, as the launcher recorded it."""
    found: dict[int, list[str]] = {}
    for event in read_run(run).events:
        if event.get("kind") == "failure":
            attempt = event.get("attempt")
            found.setdefault(attempt if isinstance(attempt, int) else 0, []).append(event_text(event))
    return found


def _live_ranks(run: Path) -> Iterator[str]:
    """Return what each rank on this machine is doing, those that differ from the others first; nothing if the run has ended."""
    from echelon.report.live_run import LiveRun  # noqa: PLC0415 - needed only for a run's folder

    live = LiveRun(run)
    try:
        snapshot = live.read()
    finally:
        live.close()
    if snapshot.is_live:
        others = _(" of the ranks on {host}", host=snapshot.host) if snapshot.num_machines > 1 else ""
        yield _("the run is live; state{others} (echelon watch {run} keeps it up to date):", others=others, run=run)
        yield from (f"  {row.to_text()}" for row in snapshot.rows)
    elif snapshot.outcome == "running":
        yield _("the run is live, but {why_not_live}", why_not_live=snapshot.why_not_live)


def _stalls(attempt: Path, *, all_threads: bool) -> Iterator[str]:
    pattern = re.compile(STALL_FILE.format(r"(\d+)"))
    found = {int(m[1]): path for path in attempt.iterdir() if (m := pattern.fullmatch(path.name))}
    for number, path in sorted(found.items()):
        yield f"{attempt.name}: {path.read_text(encoding='utf-8').rstrip()}"
        for folder in _ranks(attempt):
            try:
                answer = json.loads((folder / ANSWER_FILE.format(number)).read_text(encoding="utf-8"))
                stacks = [answer["stack"], *(answer["threads"] if all_threads else [])]
            except (OSError, ValueError, KeyError, TypeError):
                yield "\n" + _("{folder}: no stack recorded", folder=folder.name)
                continue
            for stack in stacks:
                title = _("{folder}, most recent call last:", folder=folder.name)
                yield f"\n{title}\n{''.join(stack).rstrip()}"


def _errors(attempt: Path) -> Iterator[str]:
    """Return each distinct error of the attempt once, with the ranks that raised it."""
    found: dict[ErrorRecord, list[int]] = {}
    for folder in _ranks(attempt):
        record = read_record(folder / ERROR_FILE)
        if record is not None:
            found.setdefault(replace(record, time_ns=0), []).append(_number(folder))
    for record, ranks in found.items():
        names = name_ranks(ranks)
        if record.type.endswith(".Preempted"):
            ending = _("saved a checkpoint and ended, because the run was preempted")
            yield f"{attempt.name}, {names}: {ending}"
            continue
        thread = _(" in thread {thread!r}", thread=record.thread) if record.thread else ""
        yield f"\n{attempt.name}, {names}: {record.type}: {record.message}{thread}"
        yield from (f"  {f.file}:{f.line} in {f.function}: {f.source}" for f in record.frames)


def _ranks(attempt: Path) -> list[Path]:
    return sorted(attempt.glob("rank_*"), key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
