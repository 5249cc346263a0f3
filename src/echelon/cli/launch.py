"""``echelon launch``: flags and files to a job, the job to torch's agent, its end to a report."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from echelon.base.cores import usable_cores
from echelon.base.device import limit_devices, num_devices
from echelon.base.errors import ConfigError, LaunchError
from echelon.base.printable import printable
from echelon.cli.launch_options import NUMBERS, STALLED, LaunchCommand, flag_layer, options, typed_flags
from echelon.config.derive import check as check_settings, check_installed, derive
from echelon.config.files import accelerators_asked_for, from_file
from echelon.config.origin import SettingSource
from echelon.config.resolve import Layer, Resolved, resolve
from echelon.config.run_record import RUN_FILE, to_run_file
from echelon.config.schema import RunConfig
from echelon.config.search_paths import find
from echelon.config.sources import from_environment, without_effect
from echelon.launch.environment import rank_variables
from echelon.launch.failures.failure import exit_status, explain, first_failure
from echelon.launch.interrupts import Interrupted, Interrupts, watch
from echelon.launch.local.capacity import check_capacity
from echelon.launch.local.goodput_recorder import process_start_ns
from echelon.launch.local.output import Outputs, parse_streams
from echelon.launch.local.ranks import STALL_FILE
from echelon.launch.local.slots import Slots, is_this_machine, named_slots, no_accelerator
from echelon.launch.multinode.machines import CliOverrides, check_meeting, interface_variables, meet, node_range
from echelon.launch.multinode.multinode_session import rules_of, together
from echelon.launch.multinode.node import RunOver
from echelon.launch.schedulers.slurm import current_step
from echelon.launch.script import Script, check
from echelon.launch.supervisor import StallRules
from echelon.status.stop_barrier import EXIT_CODE, SIGNALS

__all__ = ["command"]

# Names of --num_processes that say on what the processes run.
_OF_ACCELERATORS = re.compile("gpus|accelerators")


@click.command("launch", cls=LaunchCommand, context_settings={"allow_interspersed_args": False})
@options
@click.argument("script", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT on one or more processes of this machine, or of several.

    On several machines the same command is given on each. Flags may be written with _ or -. Everything after SCRIPT belongs to it.
    """
    with watch() as interrupts:
        try:
            wanted = Script(kind=_kind(flags), target=script, args=args, has_local_rank=flags["local_rank_arg"])
            code = _launch(ctx, wanted, flags, interrupts)
        except Interrupted as stop:
            code = _say_interrupted(stop)
        except RunOver as over:
            code = over.order.code
    ctx.exit(code)


def _kind(flags: dict[str, Any]) -> Any:
    if flags["module"] and flags["no_python"]:
        raise ConfigError(
            "-m and --no_python exclude each other", where="flags -m, --no_python", do="give one of the two"
        )
    return "module" if flags["module"] else "program" if flags["no_python"] else "script"


def _launch(ctx: click.Context, script: Script, flags: dict[str, Any], interrupts: Interrupts) -> int:
    began_ns = process_start_ns()
    # First everything that can be wrong without torch, whose import takes a second or two.
    typed = typed_flags(ctx)
    layer = flag_layer(flags, typed)
    check(script)
    file, resolved = _resolve(layer, flags)
    if any(
        getattr(resolved.value, f"deepspeed_{name}") for name in ("hostfile", "inclusion_filter", "exclusion_filter")
    ):
        from echelon.cli.multi_host_launch import run_on_other_machines  # noqa: PLC0415 - seldom needed

        code = run_on_other_machines(ctx, resolved, interrupts)
        if code is not None:
            return code
    asked = CliOverrides(
        nnodes=flags["num_machines"],
        **{name: flags[name] for name in ("rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr", "listen_on")},
        is_insecure=flags["insecure_network"],
        typed=typed,
    )
    is_open = resolved.origins["num_machines"].source is SettingSource.DEFAULT
    step = current_step() if is_open or resolved.value.num_machines > 1 else None
    num_machines = step.num_nodes if step is not None and is_open else resolved.value.num_machines
    is_alone = num_machines == 1
    if is_alone:
        _check_one_machine(resolved, flags, typed)
    else:
        check_meeting(resolved, asked, step)
    port = _port(resolved, flags, typed) if is_alone else 0
    if flags["multi_gpu"] and resolved.value.cpu:
        raise ConfigError(
            "--multi_gpu and --cpu exclude each other", where=f"flag {typed['multi_gpu']}", do="give one of the two"
        )
    slots = named_slots(resolved)
    num_accelerators = 0 if resolved.value.cpu else num_devices()
    if num_accelerators == 0 and not resolved.value.cpu:
        _check_file_for_cpu(flags["config_file"] or file)
    share = resolved if is_alone else _share(resolved, typed, asked, num_machines)
    num_processes = _num_processes(share, flags, typed, num_accelerators, slots)
    is_elastic = not is_alone and ":" in (asked.nnodes or "")
    check_settings(resolved, world_size=None if is_elastic else num_processes * num_machines)
    if script.kind != "program":
        check_installed(resolved, Path(script.target) if script.kind == "script" else None)
    if not flags["oversubscribe"]:
        check_capacity(
            num_processes,
            origin=_origin_of_number(resolved, typed, slots),
            imports_torch=script.kind != "program",
            uses_cpu=num_accelerators == 0,
        )
    outputs = _outputs(flags, num_processes)
    if outputs.debugged is not None and script.kind == "program":
        raise ConfigError("--debugger needs a Python script", where="flag --no_python", do="leave one of the two out")
    threads = flags["num_cpu_threads_per_process"]
    machines = None if is_alone else meet(resolved, asked, num_processes=num_processes, step=step)
    variables = rank_variables(
        resolved,
        num_processes=num_processes,
        num_threads=threads,
        has_accelerator=num_accelerators > 0,
        interface=None if machines is None else interface_variables(machines.interface),
    )
    if slots is not None and num_accelerators:
        variables.update(limit_devices(slots.of(num_accelerators, on_cpu=False)))
    if (message := without_effect()) is not None:  # the ranks leave it to the launcher: once for a job
        print(f"echelon: warning: {printable(message)}", file=sys.stderr)
    if not flags["quiet"]:
        _say_notes(resolved, variables, threads, file)
    value = resolved.value
    stall = StallRules(
        timeout=timedelta(seconds=value.stall_timeout),
        on_stall=value.on_stall,
        slow_timeout=None if value.slow_timeout is None else timedelta(seconds=value.slow_timeout),
    )
    grace = timedelta(seconds=flags["preemption_grace"])
    logs = "above; --log_dir DIR keeps the output of each rank apart"
    with ExitStack() as stack:
        # On a shared disk several machines may begin in one second, and pods have the same numbers.
        machine = "" if machines is None else f"{machines.info.host}-{machines.info.uid[:4]}-"
        directory = stack.enter_context(_directory(flags["log_dir"], machine))
        stack.enter_context(_terminal_restored())
        (directory / RUN_FILE).write_text(to_run_file(resolved), encoding="utf-8")
        logs = str(directory) if flags["log_dir"] else logs
        part = None
        if machines is not None:
            rules = rules_of(
                machines,
                max_restarts=flags["max_restarts"],
                stall=stall,
                preemption_grace=grace,
                logs=logs,
                directory=directory,
                began_ns=began_ns,
            )
            part = stack.enter_context(together(machines, rules, interrupts))
        from echelon.launch.agent import Job, run_job  # noqa: PLC0415 - imports torch: only now, all checks are done

        job = Job(
            script=script,
            num_processes=num_processes,
            environment=variables,
            directory=directory,
            outputs=outputs,
            logs=logs,
            run_id=flags["rdzv_id"] or f"echelon-{os.getpid()}",
            port=port,
            max_restarts=flags["max_restarts"],
            monitor_interval=timedelta(seconds=flags["monitor_interval"]),
            stall=stall,
            preemption_grace=grace,
            is_warm=not flags["no_warm"] and outputs.debugged is None,  # a forked rank has no terminal to read from
            began_ns=began_ns,
        )
        interrupts.hold()
        outcome = run_job(job, interrupts, None if part is None else part.node)
    books = outcome.books if part is None or part.books is None else part.books
    if flags["summary"] or (books.is_worth_telling and not flags["quiet"]):
        for line in books.lines():
            print(f"echelon: {line}", file=sys.stderr)
    if outcome.code is not None and outcome.preemption is None:
        return outcome.code
    if outcome.stall is not None:
        return STALLED
    if outcome.preemption is not None:
        return outcome.preemption.tell()
    ends = outcome.ends
    if first_failure(ends) is not None:
        what, where, do = explain(ends, logs=job.logs)
        print(f"echelon: {LaunchError(what, where=where, do=do)}", file=sys.stderr)
    return exit_status(ends)


def _resolve(layer: Layer, flags: dict[str, Any]) -> tuple[Path | None, Resolved[RunConfig]]:
    """Return the file that nobody named and that was read all the same, and the settings of the run."""
    found = None if flags["config_file"] else find()
    named = flags["config_file"] or found
    layers = [layer, from_environment(), *([from_file(named)] if named else [])]
    resolved = derive(resolve(RunConfig, layers, strict=flags["strict"]))
    check_settings(resolved)
    return found, resolved


def _check_one_machine(resolved: Resolved[RunConfig], flags: dict[str, Any], typed: dict[str, str]) -> None:
    value, origins = resolved.value, resolved.origins
    if value.machine_rank != 0:
        raise ConfigError(
            f"machine rank {value.machine_rank}, and one machine",
            where=str(origins["machine_rank"]),
            do="give the number of machines (--num_machines, --nnodes), or leave it out",
        )
    if value.rdzv_backend not in (None, "c10d", "static"):
        raise ConfigError(
            f"rendezvous backend {value.rdzv_backend!r} is not supported",
            where=str(origins["rdzv_backend"]),
            do="leave it out: on one machine the processes always meet on loopback",
        )
    endpoint = flags["rdzv_endpoint"]
    hosts = [(value.main_process_ip, str(origins["main_process_ip"]))]
    if endpoint is not None:
        hosts.append((endpoint.rpartition(":")[0] or endpoint, f"flag {typed['rdzv_endpoint']}"))
    for host, origin in hosts:
        if host is not None and not is_this_machine(host):
            raise ConfigError(
                f"{host} is not this machine, and the run has one machine",
                where=origin,
                do="give the number of machines (--num_machines, --nnodes); or leave it out: on one machine the processes "
                "always meet on loopback",
            )


def _share(
    resolved: Resolved[RunConfig], typed: dict[str, str], asked: CliOverrides, num_machines: int
) -> Resolved[RunConfig]:
    """Return the settings with ``num_processes`` of this machine: accelerate's is that of all together, torchrun's of each."""
    total = resolved.value.num_processes
    flag = typed.get("num_processes", "").replace("_", "-")
    if total is None or (flag and flag != "--num-processes"):
        return resolved
    origin = resolved.origins["num_processes"]
    least, most = node_range(resolved, asked) if resolved.value.num_machines > 1 else (num_machines, num_machines)
    if total % num_machines or least != most:
        why = f"do not divide by {num_machines} machines" if least == most else f"on {least} to {most} machines"
        raise ConfigError(
            f"{total} processes {why}", where=str(origin), do="give those of one machine: --nproc_per_node N"
        )
    return replace(resolved, value=replace(resolved.value, num_processes=total // num_machines))


def _port(resolved: Resolved[RunConfig], flags: dict[str, Any], typed: dict[str, str]) -> int:
    if resolved.value.main_process_port is not None:
        return resolved.value.main_process_port
    port = (flags["rdzv_endpoint"] or "").rpartition(":")
    if not port[1]:
        return 0
    if not port[2].isdigit() or int(port[2]) > 65535:
        raise ConfigError(
            f"{port[2]!r} is not a port", where=f"flag {typed['rdzv_endpoint']}", do="give host:port, port 0 to 65535"
        )
    return int(port[2])


def _num_processes(
    resolved: Resolved[RunConfig],
    flags: dict[str, Any],
    typed: dict[str, str],
    num_accelerators: int,
    slots: Slots | None = None,
) -> int:
    asked = flags["num_processes"]
    if num_accelerators == 0 and (asked == "gpu" or flags["multi_gpu"]):
        flag = typed["num_processes"] if asked == "gpu" else typed["multi_gpu"]
        raise ConfigError(
            "this machine has no accelerator",
            where=f"flag {flag}",
            do="give --num_processes N to run N processes on the CPU",
        )
    if num_accelerators == 0 and not resolved.value.cpu and _OF_ACCELERATORS.search(typed.get("num_processes", "")):
        raise no_accelerator(f"{typed['num_processes']} asks for accelerators", f"flag {typed['num_processes']}")
    named = 0 if slots is None else len(slots.of(num_accelerators, on_cpu=resolved.value.cpu))
    usable = named if named and num_accelerators else num_accelerators
    if asked in NUMBERS:
        # As torchrun: auto is one for each accelerator, on a machine without one for each core.
        return (os.cpu_count() or 1) if asked == "cpu" or num_accelerators == 0 else usable
    number, origin = resolved.value.num_processes, resolved.origins["num_processes"]
    if slots is not None and named and (number is None or origin.source < slots.origin.source):
        return named  # --include localhost:0,2 over the file's num_processes: 8
    if number is None:
        return max(1, num_accelerators)
    if 0 < usable < number:
        what = f"this machine has {num_accelerators}" if slots is None else f"{slots.origin} names {usable}"
        raise ConfigError(
            f"{number} processes, but {what} accelerators",
            where=str(origin),
            do=f"give at most {usable}, or --cpu to run all of them on the CPU",
        )
    return number


def _check_file_for_cpu(path: str | Path | None) -> None:
    """Raise where the file of settings was written for accelerators: there are none, and nobody said that the CPU is meant."""
    asked = None if path is None else accelerators_asked_for(path)
    if asked is not None:
        raise no_accelerator(f"distributed_type: {asked.value} asks for accelerators", str(asked.origin))


def _origin_of_number(resolved: Resolved[RunConfig], typed: dict[str, str], slots: Slots | None) -> str:
    if "num_processes" in typed:
        return f"flag {typed['num_processes']}"
    origin = resolved.origins["num_processes"]
    is_named = slots is not None and (resolved.value.num_processes is None or origin.source < slots.origin.source)
    return str(slots.origin) if slots is not None and is_named else str(origin)


def _outputs(flags: dict[str, Any], num_processes: int) -> Outputs:
    tee, redirects = flags["tee"], flags["redirects"]
    if redirects is not None and flags["log_dir"] is None:
        raise ConfigError("--redirects needs a place for the files", where="flag --redirects", do="add --log_dir DIR")
    debugged = flags["debugger"]
    if debugged is not None and debugged >= num_processes:
        raise ConfigError(
            f"there is no rank {debugged}", where="flag --debugger", do=f"give a rank from 0 to {num_processes - 1}"
        )
    if tee is None and redirects is None:
        # The others leave the terminal to the debugger, or at least say that it is they.
        if flags["log_dir"] is not None and debugged is not None:
            redirects = "3"
        elif flags["log_dir"] is not None or debugged is not None:
            tee = "3"
    return Outputs(
        tee=parse_streams(tee or "0", num_processes=num_processes, flag="--tee"),
        redirect=parse_streams(redirects or "0", num_processes=num_processes, flag="--redirects"),
        debugged=debugged,
    )


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """Set the terminal to what it was: a debugger that is stopped while it asks leaves it without echo."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415 - not on Windows, which has no such terminal either

    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextmanager
def _directory(log_dir: str | None, machine: str = "") -> Iterator[Path]:
    """Yield a new folder: below ``log_dir`` to stay, else one that goes unless it holds the stacks of a stall."""
    if log_dir is None:
        path = Path(tempfile.mkdtemp(prefix="echelon-"))
        try:
            yield path
        finally:
            if not any(path.glob(f"attempt_*/{STALL_FILE.format('*')}")):  # `echelon doctor` is to find the stacks
                shutil.rmtree(path, ignore_errors=True)
        return
    path = Path(log_dir).absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{machine}{os.getpid()}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the log folder {path}: {error.strerror}",
            where="flag --log_dir",
            do="name a folder that you can write to",
        ) from error
    yield path


def _say_notes(
    resolved: Resolved[RunConfig], variables: dict[str, str], threads: int | None, file: Path | None
) -> None:
    if file is not None:
        print(f"echelon: settings from {printable(str(file))}; --config_file names another file", file=sys.stderr)
    for lost in resolved.shadowed:
        winner = getattr(resolved.value, lost.name)
        print(
            f"echelon: {lost.name}={winner!r} (from {printable(str(lost.winner))}) overrides {lost.value!r} "
            f"(from {printable(str(lost.origin))})",
            file=sys.stderr,
        )
    if threads is None and "OMP_NUM_THREADS" in variables:
        print(
            f"echelon: OMP_NUM_THREADS={variables['OMP_NUM_THREADS']} for each process ({usable_cores()} cores can be used); "
            "--num_cpu_threads_per_process N changes it",
            file=sys.stderr,
        )


def _say_interrupted(stop: Interrupted) -> int:
    name = signal.Signals(stop.number).name
    error = LaunchError(
        f"stopped by {name}: every process has ended",
        where=f"the launcher (process {os.getpid()})",
        do="nothing is left over; start it again with the same command",
    )
    print(f"echelon: {error}", file=sys.stderr)
    return EXIT_CODE if stop.number in SIGNALS else 128 + stop.number
