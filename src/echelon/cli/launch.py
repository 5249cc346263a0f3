"""``echelon launch``: turns flags and config files into a job, runs it, and reports how it ended."""

from __future__ import annotations

import os
import platform
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from echelon.base import environ
from echelon.base.cores import usable_cores
from echelon.base.device import limit_devices, num_devices
from echelon.base.errors import ConfigError, LaunchError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.cli.help.completion import complete_paths
from echelon.cli.help.misplaced_flags import note_about_flags
from echelon.cli.launch_options import ARGV, NUMBERS, OPTIONS, LaunchCommand, flag_layer, typed_flags
from echelon.cli.launch_plan import plan_first
from echelon.config.derive import check as check_settings, check_installed, derive
from echelon.config.explain import overridden
from echelon.config.files import find_accelerator_request, find_config_file, from_file
from echelon.config.library_variables import replaced_libraries
from echelon.config.origin import SettingSource
from echelon.config.resolve import Layer, Resolved, resolve
from echelon.config.run_record import RUN_FILE, to_run_file
from echelon.config.schema import RunConfig
from echelon.config.sources import from_environment, without_effect
from echelon.launch.agent import Job, run_job
from echelon.launch.coordinator import joined_run
from echelon.launch.environment import LOOPBACK_INTERFACE, rank_variables
from echelon.launch.interrupts import Interrupted, Interrupts, handle_signals
from echelon.launch.local.capacity import check_capacity
from echelon.launch.local.output import Outputs, parse_streams
from echelon.launch.local.run_folder import run_folder
from echelon.launch.local.slots import Slots, is_this_machine, named_slots, no_accelerator
from echelon.launch.multinode.machines import (
    CliOverrides,
    MultinodePlan,
    check_rendezvous,
    make_plan,
    node_range,
)
from echelon.launch.node import RunOver, RunRules
from echelon.launch.schedulers.slurm import Step, current_step
from echelon.launch.script import Script, check
from echelon.launch.supervisor import StallRules
from echelon.status.run_facts import process_start_ns
from echelon.status.run_files import DEFAULT_PARENT, HYPERPARAMETERS_FILE, append_line
from echelon.status.stop_barrier import EXIT_CODE, SIGNALS
from echelon.world.launch_variables import is_recording_off

# Names of --num_processes that count accelerators.
_OF_ACCELERATORS = re.compile("gpus|accelerators")
_USAGE_ERROR = 2  # exit code of argparse and click


@click.command("launch", cls=LaunchCommand, params=[*OPTIONS], context_settings={"allow_interspersed_args": False})
@click.argument("script", metavar="SCRIPT", shell_complete=complete_paths)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=complete_paths)
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT on one or more processes, on this machine or on several.

    On several machines, run the same command on each. Flags may be written with _ or -. All arguments after SCRIPT are passed
    to the script.
    """
    with handle_signals() as interrupts:
        try:
            target = Script(kind=_kind(flags), target=script, args=args, has_local_rank=flags["local_rank_arg"])
            code = _launch(ctx, target, flags, interrupts)
        except Interrupted as stop:
            code = _report_interrupted(stop)
    ctx.exit(code)


def _kind(flags: Mapping[str, Any]) -> Any:
    if flags["module"] and flags["no_python"]:
        raise ConfigError(
            _("-m and --no_python are mutually exclusive"), where="flags -m, --no_python", do=_("remove one of them")
        )
    return "module" if flags["module"] else "program" if flags["no_python"] else "script"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The parsed command line."""

    script: Script
    flags: Mapping[str, Any]
    typed: Mapping[str, str]
    """Maps each parameter name to the flag as the user typed it."""
    resolved: Resolved[RunConfig]
    file: Path | None
    """Config file found on the search path; None if ``--config_file`` was given or no file was found."""
    libraries: Mapping[str, str]
    """The environment variables that tell ranks which libraries echelon replaces; empty if it replaces none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machines:
    """The machines that take part in the run."""

    number: int
    overrides: CliOverrides
    step: Step | None
    """The Slurm step that this launcher runs in, if any."""
    port: int
    """Store port for a single-machine run; 0 selects any free port."""

    @property
    def is_single(self) -> bool:
        return self.number == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Processes:
    """The processes that run on this machine."""

    number: int
    num_accelerators: int
    slots: Slots | None


def _launch(ctx: click.Context, script: Script, flags: dict[str, Any], interrupts: Interrupts) -> int:
    began_ns = process_start_ns()
    # Run all checks that do not need torch first, because importing it takes one or two seconds.
    typed = typed_flags(ctx)
    layer = flag_layer(flags, typed)
    check(script)
    is_noted = not flags["quiet"] and _note_misplaced_flags(ctx, script, typed, failed=False)
    libraries = _libraries(script, flags)
    file, resolved = _resolve(layer, flags)
    if any(
        getattr(resolved.value, f"deepspeed_{name}") for name in ("hostfile", "inclusion_filter", "exclusion_filter")
    ):
        from echelon.cli.multi_host_launch import run_on_other_machines  # noqa: PLC0415 - rarely needed

        code = run_on_other_machines(ctx, resolved, interrupts)
        if code is not None:
            return code
    request = _Request(script=script, flags=flags, typed=typed, resolved=resolved, file=file, libraries=libraries)
    machines = _count_machines(request)
    processes = _count_processes(request, machines)
    predicted: dict[str, Any] = {}
    if resolved.value.plan:
        code, predicted = plan_first(
            script,
            resolved,
            devices=processes.number,
            machines=machines.number,
            has_accelerator=processes.num_accelerators > 0,
        )
        if code:
            return code
    outputs = _outputs(flags, processes.number)
    if outputs.debugged is not None and script.kind == "program":
        raise ConfigError(
            _("--debugger requires a Python script"), where="flag --no_python", do=_("remove one of these flags")
        )
    plan = None
    if not machines.is_single:
        plan = make_plan(resolved, machines.overrides, num_processes=processes.number, step=machines.step)
    variables = _variables(request, processes, plan)
    # On a shared disk, several machines may start in the same second, and pods often have equal process ids.
    machine = "" if plan is None else f"{plan.info.host}-{plan.info.uid[:4]}-"
    with run_folder(
        flags["log_dir"],
        name=flags["name"] or script.name,
        machine=machine,
        is_recorded=not (flags["no_record"] or is_recording_off()),
        began_ns=began_ns,
    ) as (directory, record):
        (directory / RUN_FILE).write_text(to_run_file(resolved), encoding="utf-8")
        record.describe(
            command=["echelon", "launch", *ctx.meta[ARGV]],
            script=script.target,
            arguments=script.args,
            num_processes=processes.number * machines.number,
            num_machines=machines.number,
            name=flags["name"],
            tags=flags["tag"],
        )
        if predicted and record.folder is not None:
            append_line(record.folder / HYPERPARAMETERS_FILE, {"group": "training", "values": predicted})
        rules = RunRules(
            max_restarts=flags["max_restarts"],
            stall=StallRules(
                timeout=timedelta(seconds=resolved.value.stall_timeout),
                on_stall=resolved.value.on_stall,
                slow_timeout=None
                if resolved.value.slow_timeout is None
                else timedelta(seconds=resolved.value.slow_timeout),
            ),
            preemption_grace=timedelta(seconds=flags["preemption_grace"]),
            logs=str(directory) if flags["log_dir"] else _("above; --log_dir DIR writes one log file per rank"),
            directory=directory,
            began_ns=began_ns,
            record=record,
            is_debug=resolved.value.debug,
        )
        try:
            code = _run(request, processes, machines, plan, variables, outputs, rules, interrupts)
        except RunOver as over:  # before this machine had ranks
            if over.result.error:
                say(over.result.error, kind="error")
            code = over.result.code
        record.end("succeeded" if code == 0 else "preempted" if code == EXIT_CODE else "failed", code)
    if record.folder is not None and (record.has_steps or code != 0) and not flags["quiet"]:
        _say_where(directory, flags["log_dir"])
    # Again at the end, because the program's output may have moved the first note out of sight.
    if is_noted or code == _USAGE_ERROR:
        _note_misplaced_flags(ctx, script, typed, failed=code == _USAGE_ERROR)
    return code


def _run(
    request: _Request,
    processes: _Processes,
    machines: _Machines,
    plan: MultinodePlan | None,
    variables: Mapping[str, str],
    outputs: Outputs,
    rules: RunRules,
    interrupts: Interrupts,
) -> int:
    """Run the processes until the end, print the goodput, and return the exit code."""
    flags = request.flags
    with ExitStack() as stack:
        stack.enter_context(_terminal_restored())
        node = stack.enter_context(
            joined_run(plan, rules, interrupts, num_processes=processes.number, port=machines.port)
        )
        job = Job(
            script=request.script,
            num_processes=processes.number,
            environment=variables,
            outputs=outputs,
            run_id=flags["rdzv_id"] or f"echelon-{os.getpid()}",
            monitor_interval=timedelta(seconds=flags["monitor_interval"]),
            # A forked rank cannot read from the terminal.
            is_warm=not flags["no_warm"] and outputs.debugged is None,
            rules=rules,
        )
        interrupts.hold()
        goodput = run_job(job, interrupts, node)
    goodput = node.goodput or goodput
    goodput.record(rules.record)
    if flags["summary"] or (goodput.is_notable and not flags["quiet"]):
        for line in goodput.lines():
            say(line)
    return node.report_end()


def _say_where(folder: Path, log_dir: str | None) -> None:
    """Print where the run is recorded, and the command that shows it."""
    shown = Path(log_dir or DEFAULT_PARENT) / folder.name
    run = f" {shlex.quote(str(shown))}" if log_dir else ""  # without a folder, it shows the newest run in echelon-runs
    say(_("recorded in {shown}; echelon report{run} shows it", shown=shown, run=run))


def _note_misplaced_flags(ctx: click.Context, script: Script, typed: Mapping[str, str], *, failed: bool) -> bool:
    note = note_about_flags(ctx, script, typed=typed, failed=failed)
    if note is not None:
        say(f"note: {note}")
    return note is not None


def _libraries(script: Script, flags: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that tell ranks which libraries echelon replaces, and print those libraries."""
    requested = flags["libraries"] or replaced_libraries()
    if requested is None:
        return {}
    from echelon.ecosystem import swap  # noqa: PLC0415 - runs without it load nothing of it

    where = "flag --as" if flags["libraries"] else _("env {name}", name=swap.VARIABLE)
    libraries = swap.parse_libraries(requested.split(","), where=where)
    if script.kind == "program":
        raise ConfigError(
            _("{where} requires a Python script", where=where), where="flag --no_python", do=_("remove one of the two")
        )
    if not flags["quiet"]:
        say(f"{swap.describe(libraries)} ({where})")
    return swap.rank_variables(libraries)


def _resolve(layer: Layer, flags: Mapping[str, Any]) -> tuple[Path | None, Resolved[RunConfig]]:
    """Return the config file found on the search path, and the run's settings."""
    found = None if flags["config_file"] else find_config_file()
    named = flags["config_file"] or found
    layers = [layer, from_environment(), *([from_file(named)] if named else [])]
    resolved = derive(resolve(RunConfig, layers, strict=flags["strict"]))
    check_settings(resolved)
    return found, resolved


def _count_machines(request: _Request) -> _Machines:
    resolved, flags = request.resolved, request.flags
    overrides = CliOverrides(
        nnodes=flags["num_machines"],
        **{name: flags[name] for name in ("rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr", "listen_on")},
        is_insecure=flags["insecure_network"],
        typed=request.typed,
    )
    is_default = resolved.origins["num_machines"].source is SettingSource.DEFAULT
    step = current_step() if is_default or resolved.value.num_machines > 1 else None
    number = step.num_nodes if step is not None and is_default else resolved.value.num_machines
    if number > 1:
        check_rendezvous(resolved, overrides, step)
        return _Machines(number=number, overrides=overrides, step=step, port=0)
    _check_one_machine(request)
    return _Machines(number=1, overrides=overrides, step=step, port=_port(request))


def _check_one_machine(request: _Request) -> None:
    value, origins = request.resolved.value, request.resolved.origins
    if value.machine_rank != 0:
        raise ConfigError(
            _("machine rank {machine_rank} is out of range for a single-machine run", machine_rank=value.machine_rank),
            where=str(origins["machine_rank"]),
            do=_("set the number of machines with --num_machines or --nnodes, or remove the machine rank"),
        )
    if value.rdzv_backend not in (None, "c10d", "static"):
        raise ConfigError(
            _("rendezvous backend {rdzv_backend!r} is not supported", rdzv_backend=value.rdzv_backend),
            where=str(origins["rdzv_backend"]),
            do=_("remove this setting; processes on a single machine always use the loopback interface"),
        )
    endpoint = request.flags["rdzv_endpoint"]
    hosts = [(value.main_process_ip, str(origins["main_process_ip"]))]
    if endpoint is not None:
        hosts.append((endpoint.rpartition(":")[0] or endpoint, _("flag {name}", name=request.typed["rdzv_endpoint"])))
    for host, origin in hosts:
        if host is not None and not is_this_machine(host):
            raise ConfigError(
                _("{host} is not an address of this machine, but the run uses only this machine", host=host),
                where=origin,
                do=_(
                    "set the number of machines with --num_machines or --nnodes, or remove the address; processes on a "
                    "single machine always use the loopback interface"
                ),
            )


def _port(request: _Request) -> int:
    if request.resolved.value.main_process_port is not None:
        return request.resolved.value.main_process_port
    _host, colon, port = (request.flags["rdzv_endpoint"] or "").rpartition(":")
    if not colon:
        return 0
    if not port.isdigit() or int(port) > 65535:
        where = _("flag {name}", name=request.typed["rdzv_endpoint"])
        raise ConfigError(
            _("{port!r} is not a valid port", port=port),
            where=where,
            do=_("pass HOST:PORT with a port from 0 to 65535"),
        )
    return int(port)


def _count_processes(request: _Request, machines: _Machines) -> _Processes:
    """Return this machine's processes after checking that the machine and the settings support them."""
    resolved, flags, typed = request.resolved, request.flags, request.typed
    if flags["multi_gpu"] and resolved.value.cpu:
        raise ConfigError(
            _("--multi_gpu and --cpu are mutually exclusive"),
            where=_("flag {name}", name=typed["multi_gpu"]),
            do=_("remove one of them"),
        )
    slots = named_slots(resolved)
    num_accelerators = 0 if resolved.value.cpu else num_devices()
    if num_accelerators == 0 and not resolved.value.cpu:
        _check_file_for_cpu(flags["config_file"] or request.file)
    local = resolved
    if not machines.is_single:
        local = per_machine(resolved, typed, machines.overrides, machines.number)
    number = _num_processes(local, flags, typed, num_accelerators, slots)
    is_elastic = not machines.is_single and ":" in (machines.overrides.nnodes or "")
    check_settings(resolved, world_size=None if is_elastic else number * machines.number)
    is_python = request.script.kind != "program"
    if is_python:
        check_installed(resolved, Path(request.script.target) if request.script.kind == "script" else None)
    if not flags["oversubscribe"]:
        origin = _origin_of_number(request, slots)
        check_capacity(number, origin=origin, imports_torch=is_python, uses_cpu=num_accelerators == 0)
    return _Processes(number=number, num_accelerators=num_accelerators, slots=slots)


def per_machine(
    resolved: Resolved[RunConfig], typed: Mapping[str, str], overrides: CliOverrides, num_machines: int
) -> Resolved[RunConfig]:
    """Return the settings with ``num_processes`` counted per machine, as in torchrun; accelerate's number is the total."""
    total = resolved.value.num_processes
    flag = typed.get("num_processes", "").replace("_", "-")
    if total is None or (flag and flag != "--num-processes"):
        return resolved
    is_fixed = resolved.value.num_machines == 1  # num_machines comes from a Slurm step
    least, most = (num_machines, num_machines) if is_fixed else node_range(resolved, overrides)
    if total % num_machines or least != most:
        problem = (
            f"cannot be divided evenly among {num_machines} machines"
            if least == most
            else f"on {least} to {most} machines"
        )
        raise ConfigError(
            _("{total} processes {problem}", total=total, problem=problem),
            where=str(resolved.origins["num_processes"]),
            do=_("set the number of processes per machine with --nproc_per_node N"),
        )
    return replace(resolved, value=replace(resolved.value, num_processes=total // num_machines))


def _num_processes(
    resolved: Resolved[RunConfig],
    flags: Mapping[str, Any],
    typed: Mapping[str, str],
    num_accelerators: int,
    slots: Slots | None = None,
) -> int:
    flag = flags["num_processes"]
    if num_accelerators == 0 and (flag == "gpu" or flags["multi_gpu"]):
        raise ConfigError(
            _("this machine has no accelerator"),
            where=_("flag {name}", name=typed["num_processes"] if flag == "gpu" else typed["multi_gpu"]),
            do=_("pass --num_processes N to run N processes on the CPU"),
        )
    if num_accelerators == 0 and not resolved.value.cpu and _OF_ACCELERATORS.search(typed.get("num_processes", "")):
        raise no_accelerator(
            _("{flag} requests accelerators", flag=typed["num_processes"]),
            _("flag {name}", name=typed["num_processes"]),
        )
    named = 0 if slots is None else len(slots.of(num_accelerators, on_cpu=resolved.value.cpu))
    usable = named if named and num_accelerators else num_accelerators
    if flag in NUMBERS:
        # As in torchrun, auto means one per accelerator, or one per core on a machine without accelerators.
        return (os.cpu_count() or 1) if flag == "cpu" or num_accelerators == 0 else usable
    number, origin = resolved.value.num_processes, resolved.origins["num_processes"]
    if slots is not None and named and (number is None or origin.source < slots.origin.source):
        return named  # --include localhost:0,2 overrides the file's num_processes: 8
    if number is None:
        return max(1, num_accelerators)
    if 0 < usable < number:
        what = (
            _("this machine has {num_accelerators}", num_accelerators=num_accelerators)
            if slots is None
            else f"{slots.origin} names {usable}"
        )
        shown = num_accelerators if slots is None else usable
        raise ConfigError(
            _("{number} processes, but {what} accelerator{s}", number=number, what=what, s="s" if shown != 1 else ""),
            where=str(origin),
            do=_(
                "use at most {usable} process{es}, or pass --cpu to run all of them on the CPU",
                usable=usable,
                es="es" if usable != 1 else "",
            ),
        )
    return number


def _check_file_for_cpu(path: str | Path | None) -> None:
    """Raise an error if the config file requests accelerators; call this if the machine has none and ``--cpu`` was not given."""
    setting = None if path is None else find_accelerator_request(path)
    if setting is not None:
        raise no_accelerator(
            _("distributed_type: {value} requests accelerators", value=setting.value), str(setting.origin)
        )


def _origin_of_number(request: _Request, slots: Slots | None) -> str:
    if "num_processes" in request.typed:
        return _("flag {name}", name=request.typed["num_processes"])
    resolved = request.resolved
    origin = resolved.origins["num_processes"]
    is_named = slots is not None and (resolved.value.num_processes is None or origin.source < slots.origin.source)
    return str(slots.origin) if slots is not None and is_named else str(origin)


def _outputs(flags: Mapping[str, Any], num_processes: int) -> Outputs:
    tee, redirects = flags["tee"], flags["redirects"]
    if redirects is not None and flags["log_dir"] is None:
        raise ConfigError(_("--redirects requires --log_dir"), where="flag --redirects", do=_("add --log_dir DIR"))
    debugged = flags["debugger"]
    if debugged is not None and debugged >= num_processes:
        raise ConfigError(
            _("there is no rank {debugged}", debugged=debugged),
            where="flag --debugger",
            do=_("use a rank from 0 to {most}", most=num_processes - 1),
        )
    if tee is None and redirects is None:
        # The output of the other ranks goes to files, or at least gets a prefix, so that the debugger stays readable.
        if flags["log_dir"] is not None and debugged is not None:
            redirects = "3"
        elif flags["log_dir"] is not None or debugged is not None:
            tee = "3"
    return Outputs(
        tee=parse_streams(tee or "0", num_processes=num_processes, flag="--tee"),
        redirect=parse_streams(redirects or "0", num_processes=num_processes, flag="--redirects"),
        debugged=debugged,
    )


def _variables(request: _Request, processes: _Processes, plan: MultinodePlan | None) -> dict[str, str]:
    """Return the ranks' environment variables, and print the launcher's notes about the settings."""
    threads = request.flags["num_cpu_threads_per_process"]
    variables = rank_variables(
        request.resolved,
        num_processes=processes.number,
        num_threads=threads,
        has_accelerator=processes.num_accelerators > 0,
        interface=LOOPBACK_INTERFACE if plan is None else plan.interface,
    )
    if request.flags["strict"]:
        variables["ECHELON_STRICT"] = "1"
    if processes.slots is not None and processes.num_accelerators:
        variables.update(limit_devices(processes.slots.of(processes.num_accelerators, on_cpu=False)))
    variables.update(request.libraries)
    if (message := without_effect()) is not None:  # the ranks do not repeat this warning
        say(f"warning: {message}", kind="warning")
    if not request.flags["quiet"]:
        _print_notes(request, None if threads is not None else variables.get("OMP_NUM_THREADS"))
    return variables


def _print_notes(request: _Request, chosen_threads: str | None) -> None:
    if request.file is not None:
        say(_("using settings from {file}; pass --config_file to use a different file", file=request.file))
    for lost in request.resolved.shadowed:
        say(overridden(request.resolved, lost))
    if chosen_threads is not None and _is_first_time("omp-num-threads"):
        say(
            _(
                "OMP_NUM_THREADS={chosen_threads} for each process ({value} usable cores), because processes that "
                "each use all cores slow each other down; set OMP_NUM_THREADS or pass --num_cpu_threads_per_process "
                "N to change it (this note is printed once per machine)",
                chosen_threads=chosen_threads,
                value=usable_cores(),
            )
        )


def _is_first_time(note: str) -> bool:
    """Return whether ``note`` has not been printed on this machine, and mark it as printed.

    Home folders are often shared by machines, so that the mark contains the machine's name. If it cannot be written, the
    note is printed each time.
    """
    try:
        mark = environ.cache_home() / "echelon" / "notes" / f"{note}-{platform.node() or 'machine'}"
        mark.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except (OSError, RuntimeError):  # no home folder, or a read-only one
        return True
    return True


@contextmanager
def _terminal_restored() -> Iterator[None]:
    """Restore the terminal settings on exit, because a debugger that is killed while reading input leaves echo disabled."""
    if not sys.stdin.isatty():
        yield
        return
    import termios  # noqa: PLC0415 - does not exist on Windows

    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _report_interrupted(stop: Interrupted) -> int:
    error = LaunchError(
        _("stopped by {name}: all processes have ended", name=signal.Signals(stop.number).name),
        where=_("the launcher (process {pid})", pid=os.getpid()),
        do=_("rerun the same command"),
    )
    say(error, kind="error")
    return EXIT_CODE if stop.number in SIGNALS else 128 + stop.number
