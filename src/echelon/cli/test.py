"""``echelon test``: trains a small model with the given ``echelon launch`` flags, and checks the results."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _, in_english
from echelon.cli import launch
from echelon.cli.env import system, versions
from echelon.cli.stoppable import stoppable
from echelon.compat.machine import convert_bytes
from echelon.launch.environment import inherited, is_of_rank
from echelon.launch.interrupts import Interrupts, end_launcher
from echelon.testing.evidence import OWNED_FILE, CheckFinding, TestStart, read_findings, write_evidence
from echelon.world.launch_variables import NO_RECORD_VARIABLE

_PROGRAM = "echelon.testing.self_test"
_CHECKS = ("world", "exact", "data", "restart", "bandwidth", "bitwise")
_POLL_S = 0.05
_GRACE_S = 10.0  # the launcher stops its processes within 5
_SHOWN_LINES = 40  # of the output of a failed launch; the launcher's report has fewer than 30
_WRONG_SETTING = 2  # the launcher's exit code
# The user's flags follow these flags and override them.
_STALL = ("--stall_timeout", "60", "--on_stall", "stop")
# Variables that make a process part of a larger run.
_OF_LAYOUT = ("ECHELON_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


@click.command("test", context_settings={"ignore_unknown_options": True})
@click.option(
    "--gpus",
    metavar="all|N|0,2",
    help="Use all of this machine's accelerators, N accelerators, or the accelerators with these indices.",
)
@click.option("--quick", is_flag=True, help="Measure the bandwidth for small messages only.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the results (default: echelon-test-<time>.json).",
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS OF ECHELON LAUNCH]...")
@click.pass_context
def command(ctx: click.Context, gpus: str | None, quick: bool, output: Path | None, flags: tuple[str, ...]) -> None:
    """Train a small model with multiple processes and compare the result with that of a single process.

    Choose the processes with the flags of echelon launch: --num_processes, --cpu, --config_file, --num_machines, ... For a
    run on several machines, run this command on each of them, as with echelon launch. Exit codes: 0 if every check passed, 1
    if any check failed.
    """
    layout = [*_of_gpus(gpus), *flags]
    _check_flags(ctx, layout)
    output = output or Path(time.strftime("echelon-test-%Y%m%d-%H%M%S.json"))
    if not output.parent.is_dir():
        raise ConfigError(
            _("the folder {parent} does not exist", parent=output.parent),
            where="flag --output",
            do=_("create it, or pass another file"),
        )
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="echelon-test-"))
    (folder / OWNED_FILE).touch()
    results = _Results(folder)
    try:
        with stoppable(ctx) as interrupts, results:
            interrupts.hold()
            _run(layout, folder, results, interrupts, is_quick=quick)
    finally:
        if not results.failed:  # otherwise it contains the output of the processes
            shutil.rmtree(folder)
    _write(output, layout, results.records, seconds=time.monotonic() - began)
    verdict = _("every check passed")
    if results.failed:
        verdict = _("failed: {names}", names=", ".join(results.failed))
    click.echo(
        _("{verdict} ({s:.1f} s); results: {output}", verdict=verdict, s=time.monotonic() - began, output=output)
    )
    ctx.exit(1 if results.failed else 0)


def _write(path: Path, layout: Sequence[str], records: Sequence[Mapping[str, Any]], *, seconds: float) -> None:
    document = {
        "format": "echelon-test",
        "version": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "passed": all(record["passed"] is not False for record in records),
        "seconds": round(seconds, 1),
        # Names only, because values may be addresses and paths.
        "flags": [flag.partition("=")[0] for flag in layout if flag.startswith("-")],
        "versions": versions(),
        "system": system(),
        "checks": records,
    }
    try:
        write_evidence(path, document)
    except OSError as error:
        raise ConfigError(
            _("cannot write {path}: {strerror}", path=path, strerror=error.strerror),
            where="flag --output",
            do=_("pass a writable path"),
        ) from error


def _of_gpus(gpus: str | None) -> list[str]:
    if gpus is None:
        return []
    if gpus == "all":
        return ["--num_processes", "gpu"]
    if not re.fullmatch(r"\d+(,\d+)*", gpus):
        raise UsageError(
            _("{gpus!r} names no accelerators", gpus=gpus),
            where=_("flag {name}", name="--gpus"),
            do=_("pass all, a number, or indices such as 0,2"),
        )
    return ["--gpu_ids", gpus] if "," in gpus else ["--num_processes", gpus]


def _check_flags(ctx: click.Context, layout: Sequence[str]) -> None:
    """Raise an error if a script was given, or a flag that ``echelon launch`` does not accept, before any process starts."""
    context = launch.command.make_context("launch", [*layout, "-m", _PROGRAM], parent=ctx.parent)
    if context.params["script"] != _PROGRAM:
        raise UsageError(
            _("echelon test runs its own program, not {params!r}", params=context.params["script"]),
            where="echelon test",
            do=_("remove it; to run a script, use echelon launch"),
        )


class _Results:
    """The results of the checks, printed as they arrive. On a terminal, the current check is shown as well."""

    def __init__(self, folder: Path) -> None:
        self.records: list[dict[str, Any]] = []
        self._told = read_findings(folder)
        self._current: str | None = None
        self._since = time.monotonic()
        encoding = sys.stdout.encoding or "ascii"
        self._marks = (
            {True: "\u2713", False: "\u2717"} if encoding.lower().startswith("utf") else {True: "ok", False: "FAILED"}
        )
        self._bar = tqdm(
            total=len(_CHECKS), leave=False, disable=None, bar_format="{n_fmt}/{total_fmt} {desc} {elapsed}"
        )

    def __enter__(self) -> _Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [record["name"] for record in self.records if record["passed"] is False]

    @property
    def names(self) -> set[str]:
        """Names of the finished checks."""
        return {record["name"] for record in self.records}

    @property
    def current(self) -> str:
        """Name of the running check."""
        return self._current or next((name for name in _CHECKS if name not in self.names), _CHECKS[-1])

    def read_messages(self) -> None:
        """Process new messages from the ranks."""
        for one in next(self._told):
            if isinstance(one, TestStart):
                self._current = one.name
            else:
                self.add(one)
        self._bar.set_description_str(self.current, refresh=False)
        self._bar.refresh()

    def add(self, one: CheckFinding) -> None:
        """Record and print a result."""
        now = time.monotonic()
        seconds, self._since, self._current = now - self._since, now, None
        text, do = one.shown or (one.text, one.do)
        record = {**in_english(asdict(one)), "figures": dict(one.figures), "seconds": round(seconds, 2)}
        del record["shown"]
        if one.passed is not False:
            del record["do"]
        self.records.append(record)
        mark = "-" if one.passed is None else self._marks[one.passed]
        self._write(f"{mark} {one.name:<9}  {text}  ({seconds:.1f} s)")
        if one.passed is False:
            self._write("             " + _("do: {do}", do=do))
        for line in _table(one.figures.get("collectives", ())):
            self._write(f"    {line}")
        self._bar.update()

    def add_failure(self, code: int, output: Path) -> None:
        """Record that a launch failed with ``code``, and print the last lines of its output, which include the launcher's report."""
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        what = _("the processes exited with code {code}", code=code)
        self.add(
            CheckFinding(
                name=self.current,
                passed=False,
                text=what,
                do=_("see the report below; the complete output is in {output}", output=output),
            )
        )
        for line in lines[-_SHOWN_LINES:]:
            self._write(f"    | {line}")

    def _write(self, line: str) -> None:
        self._bar.write(line)
        sys.stdout.flush()


def _table(collectives: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line per collective, with its time and bandwidth for each message size."""
    by_name: dict[str, list[str]] = {}
    for one in collectives:
        speed = f" {one['algorithm_gb_per_s']:7.3f} ({one['bus_gb_per_s']:.3f})"
        is_latency = one["size_bytes"] < 1 << 16
        cell = f"{convert_bytes(one['size_bytes'])}: {one['seconds'] * 1e6:.0f} us{'' if is_latency else speed}"
        by_name.setdefault(one["name"], []).append(cell)
    if by_name:
        yield _("time per call, and algorithm (and bus) bandwidth in GB/s, for each message size")
    for name, cells in by_name.items():
        yield f"{name:<14}  {'  '.join(f'{cell:<32}' for cell in cells)}".rstrip()


def _run(layout: Sequence[str], folder: Path, results: _Results, interrupts: Interrupts, *, is_quick: bool) -> None:
    """Run the ranks, then the single process that they are compared with in the bitwise check."""
    program = ["-m", _PROGRAM]
    # One restart, because the restart check kills the ranks of the first attempt.
    start = [
        sys.executable,
        "-m",
        "echelon",
        "launch",
        "--no_record",
        *_STALL,
        *layout,
        "--max_restarts",
        "1",
        *program,
    ]
    environment = inherited()
    output = folder / "layout.txt"
    code = _run_part([*start, "layout", str(folder), *["--quick"] * is_quick], environment, output, results, interrupts)
    if code == _WRONG_SETTING and not results.records:
        click.echo(output.read_text(encoding="utf-8", errors="replace"), err=True, nl=False)
        raise click.exceptions.Exit(code)
    if code != 0:
        return results.add_failure(code, output)
    if not results.records:
        do = _("run echelon test on a machine that is part of the run")
        results.add(
            CheckFinding(name="world", passed=False, text=_("none of the run's processes is on this machine"), do=do)
        )
    elif "bitwise" not in results.names:
        alone = inherited(without=lambda name: name.startswith(_OF_LAYOUT) or is_of_rank(name))
        alone[NO_RECORD_VARIABLE] = "1"
        output = folder / "alone.txt"
        code = _run_part([sys.executable, *program, "alone", str(folder)], alone, output, results, interrupts)
        if code != 0:
            results.add_failure(code, output)
    return None


def _run_part(
    argv: Sequence[str], environment: Mapping[str, str], output: Path, results: _Results, interrupts: Interrupts
) -> int:
    """Run ``argv`` with its output in a file, print results as they arrive, and return its exit code.

    Raises:
        Interrupted: a signal was received. The processes have been stopped.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            argv, env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                interrupts.check()
                results.read_messages()
                time.sleep(_POLL_S)
        finally:
            end_launcher(process, grace_s=_GRACE_S)
    results.read_messages()
    return process.returncode
