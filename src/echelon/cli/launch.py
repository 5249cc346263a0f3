"""``echelon launch``: flags and files to a job, the job to torch's agent, its end to a report."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from echelon.base.device import num_devices
from echelon.base.errors import ConfigError, LaunchError
from echelon.base.not_offered import tpu_instead
from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import from_environment, from_file, from_flags
from echelon.launch.environment import rank_variables
from echelon.launch.failure import exit_status, explain, first_failure
from echelon.launch.interrupts import Interrupted, Interrupts, watch
from echelon.launch.output import Outputs, parse_streams
from echelon.launch.script import Script, check

__all__ = ["command"]

_ARGV = "echelon.launch.argv"


class _LaunchCommand(click.Command):
    """Keeps the flags as they were typed: an origin says ``--nproc_per_node`` when the user wrote that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGV] = list(args)
        return super().parse_args(ctx, args)


@click.command("launch", cls=_LaunchCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--num-processes",
    "--nproc-per-node",
    "num_processes",
    metavar="N",
    help="Processes to start: a number, or auto, gpu, cpu. Default: one for each accelerator, else 1.",
)
@click.option("--cpu", "--use-cpu", "cpu", is_flag=True, help="Use the CPU even where there are accelerators.")
@click.option("--multi-gpu", is_flag=True, help="One process for each accelerator (the default where there are some).")
@click.option("--tpu", is_flag=True, hidden=True)
@click.option("--mixed-precision", metavar="[no|fp16|bf16|fp8]", help="The dtype of autocast.")
@click.option("--gradient-accumulation-steps", metavar="N", help="Micro-batches in one update.")
@click.option(
    "--parity",
    metavar="[off|exact]",
    help="A loader's batch is that of each process (off), or that of all together and the update one process's (exact).",
)
@click.option(
    "--max-micro-batch-size", metavar="N", help="With exact parity: the most samples of a process in a forward pass."
)
@click.option(
    "--dynamo-backend",
    metavar="NAME",
    help="Compile prepared models by torch.compile: inductor, aot_eager, cudagraphs, ..., or no.",
)
@click.option("--dynamo-mode", metavar="NAME", help="default, reduce-overhead or max-autotune.")
@click.option("--dynamo-use-fullgraph", is_flag=True, help="A model that needs more than one graph is an error.")
@click.option("--dynamo-use-dynamic", is_flag=True, help="Compile for changing shapes.")
@click.option(
    "--dynamo-use-regional-compilation", is_flag=True, help="Compile the repeated blocks of a model one by one."
)
@click.option("--debug", is_flag=True, help="Check the shapes of every collective call across the ranks.")
@click.option(
    "--num-cpu-threads-per-process",
    type=click.IntRange(min=1),
    metavar="N",
    help="OMP_NUM_THREADS of each process; 1 when there are several.",
)
@click.option(
    "--config-file", metavar="PATH", help="A YAML or JSON file with settings; flags and environment win over it."
)
@click.option("--strict", is_flag=True, help="Two places that give one setting different values are an error.")
@click.option("-m", "--module", is_flag=True, help="The script is a module, as in python -m.")
@click.option("--no-python", is_flag=True, help="The script is a program that is run as it is.")
@click.option("--log-dir", metavar="DIR", help="Keep the output of each rank in a new folder below DIR.")
@click.option(
    "-t",
    "--tee",
    metavar="WHAT",
    help="Show output with the rank before each line: 1 stdout, 2 stderr, 3 both, or 0:3,1:2 by rank. 3 with --log-dir.",
)
@click.option("-r", "--redirects", metavar="WHAT", help="As --tee, but to the files of --log-dir only.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start all processes again when one fails, at most N times.",
)
@click.option(
    "--monitor-interval",
    type=click.FloatRange(min=0.001, max=60.0),
    default=0.05,
    metavar="SECONDS",
    help="How often to look at the processes. Default 0.05.",
)
@click.option("--quiet", "-q", is_flag=True, help="Leave the launcher's notes out; errors are still shown.")
@click.option("--standalone", is_flag=True, help="Accepted: every run on one machine is.")
@click.option("--nnodes", "--num-machines", "nnodes", metavar="N", help="Only 1 so far.")
@click.option("--node-rank", "--machine-rank", "node_rank", metavar="N", help="Only 0 so far.")
@click.option("--master-addr", "--main-process-ip", "master_addr", metavar="HOST", help="Only this machine so far.")
@click.option(
    "--master-port",
    "--main-process-port",
    "master_port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="The port of the store, on loopback. Default: a free one.",
)
@click.option("--rdzv-backend", metavar="NAME", help="c10d or static; both are loopback on one machine.")
@click.option("--rdzv-endpoint", metavar="HOST[:PORT]", help="As --master-addr and --master-port.")
@click.option("--rdzv-id", metavar="NAME", help="TORCHELASTIC_RUN_ID of the ranks.")
@click.argument("script", metavar="SCRIPT")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.pass_context
def command(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT on one or more processes of this machine.

    Flags may be written with _ or -. Everything after SCRIPT belongs to it.
    """
    with watch() as interrupts:
        try:
            code = _launch(ctx, Script(kind=_kind(flags), target=script, args=args), flags, interrupts)
        except Interrupted as stop:
            code = _say_interrupted(stop)
    ctx.exit(code)


def _kind(flags: dict[str, Any]) -> Any:
    if flags["module"] and flags["no_python"]:
        raise ConfigError(
            "-m and --no_python exclude each other", where="flags -m, --no_python", do="give one of the two"
        )
    return "module" if flags["module"] else "program" if flags["no_python"] else "script"


def _launch(ctx: click.Context, script: Script, flags: dict[str, Any], interrupts: Interrupts) -> int:
    # First everything that can be wrong without torch, whose import takes a second or two.
    typed = _typed_flags(ctx)
    if flags["tpu"]:
        raise ConfigError("echelon does not run on TPUs", where=f"flag {typed['tpu']}", do=tpu_instead())
    check(script)
    _check_one_machine(flags, typed)
    port = _port(flags, typed)
    resolved = _resolve(flags, typed)
    if flags["multi_gpu"] and resolved.value.cpu:
        raise ConfigError(
            "--multi_gpu and --cpu exclude each other", where=f"flag {typed['multi_gpu']}", do="give one of the two"
        )
    num_accelerators = 0 if resolved.value.cpu else num_devices()
    num_processes = _num_processes(resolved, flags, typed, num_accelerators)
    outputs = _outputs(flags, num_processes)
    threads = flags["num_cpu_threads_per_process"]
    variables = rank_variables(
        resolved, num_processes=num_processes, num_threads=threads, has_accelerator=num_accelerators > 0
    )
    if not flags["quiet"]:
        _say_notes(resolved, variables, threads)
    from echelon.launch.agent import Job, run_job  # noqa: PLC0415 - imports torch: only now, all checks are done

    with _directory(flags["log_dir"]) as directory:
        job = Job(
            script=script,
            num_processes=num_processes,
            environment=variables,
            directory=directory,
            outputs=outputs,
            logs=str(directory) if flags["log_dir"] else "above; --log_dir DIR keeps the output of each rank apart",
            run_id=flags["rdzv_id"] or f"echelon-{os.getpid()}",
            port=port,
            max_restarts=flags["max_restarts"],
            monitor_interval=timedelta(seconds=flags["monitor_interval"]),
        )
        interrupts.hold()
        ends = run_job(job, interrupts)
    if first_failure(ends) is not None:
        what, where, do = explain(ends, logs=job.logs)
        print(f"echelon: {LaunchError(what, where=where, do=do)}", file=sys.stderr)
    return exit_status(ends)


def _typed_flags(ctx: click.Context) -> dict[str, str]:
    """Return for each parameter given on the command line the flag as the user typed it.

    Raises:
        ConfigError: two names of one flag were given, with different values.
    """
    argv: list[str] = ctx.meta[_ARGV]
    head = argv[: len(argv) - 1 - len(ctx.params["args"])]
    names = {option: p.name for p in ctx.command.params for option in p.opts if p.name is not None}
    typed: dict[str, tuple[str, str]] = {}
    for i, token in enumerate(head):
        flag, _, value = token.partition("=")
        name = names.get(flag.replace("_", "-") if flag.startswith("--") else flag[:2])
        if name is None or ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = value or (head[i + 1] if i + 1 < len(head) else "")
        before = typed.get(name)
        if (
            before
            and before[0].replace("_", "-") != flag.replace("_", "-")
            and flag.startswith("--")
            and before[1] != value
            and not isinstance(ctx.params[name], bool)
        ):
            raise ConfigError(
                f"{before[0]} {before[1]} and {flag} {value} are two names of one setting",
                where=f"flags {before[0]}, {flag}",
                do="give one of the two",
            )
        typed[name] = (flag, value)
    return {name: flag for name, (flag, _) in typed.items()}


def _check_one_machine(flags: dict[str, Any], typed: dict[str, str]) -> None:
    nodes, rank = flags["nnodes"], flags["node_rank"]
    for name, value, accepted in (("nnodes", nodes, ("1", "1:1")), ("node_rank", rank, ("0",))):
        if value not in (None, *accepted):
            raise ConfigError(
                f"{typed[name]} {value}: several machines are not supported yet",
                where=f"flag {typed[name]}",
                do=f"leave it out, or give {accepted[0]}; on one machine --num_processes starts any number of processes",
            )
    if flags["rdzv_backend"] not in (None, "c10d", "static"):
        raise ConfigError(
            f"rendezvous backend {flags['rdzv_backend']!r} is not supported",
            where=f"flag {typed['rdzv_backend']}",
            do="leave it out: on one machine the processes always meet on loopback",
        )
    for name in ("master_addr", "rdzv_endpoint"):
        host = flags[name].rpartition(":")[0] or flags[name] if name == "rdzv_endpoint" and flags[name] else flags[name]
        if host not in (None, "localhost", "127.0.0.1", "::1", "[::1]", socket.gethostname()):
            raise ConfigError(
                f"{host} is not this machine, and several machines are not supported yet",
                where=f"flag {typed[name]}",
                do="leave it out: on one machine the processes always meet on loopback",
            )


def _port(flags: dict[str, Any], typed: dict[str, str]) -> int:
    if flags["master_port"] is not None:
        return int(flags["master_port"])
    port = (flags["rdzv_endpoint"] or "").rpartition(":")
    if not port[1]:
        return 0
    if not port[2].isdigit() or int(port[2]) > 65535:
        raise ConfigError(
            f"{port[2]!r} is not a port", where=f"flag {typed['rdzv_endpoint']}", do="give host:port, port 0 to 65535"
        )
    return int(port[2])


def _resolve(flags: dict[str, Any], typed: dict[str, str]) -> Resolved[RunConfig]:
    names = ["cpu", "mixed_precision", "gradient_accumulation_steps", "parity", "max_micro_batch_size", "debug"]
    names += [name for name in flags if name.startswith("dynamo_")]
    values = {name: (flags[name], typed[name]) for name in names if name in typed}
    number = flags["num_processes"]
    # auto, gpu and cpu become a number when the devices are known.
    if number is not None and number not in _WORDS:
        if not number.strip().lstrip("-").isdigit() or int(number) < 1:
            raise ConfigError(
                f"{number!r} is not a number of processes",
                where=f"flag {typed['num_processes']}",
                do="give an integer from 1 on, or auto, gpu or cpu",
            )
        values["num_processes"] = (int(number), typed["num_processes"])
    layers = [from_flags(values), from_environment()]
    if flags["config_file"]:
        layers.append(from_file(flags["config_file"]))
    return resolve(RunConfig, layers, strict=flags["strict"])


_WORDS = ("auto", "gpu", "cpu")


def _num_processes(
    resolved: Resolved[RunConfig], flags: dict[str, Any], typed: dict[str, str], num_accelerators: int
) -> int:
    asked = flags["num_processes"]
    if num_accelerators == 0 and (asked == "gpu" or flags["multi_gpu"]):
        flag = typed["num_processes"] if asked == "gpu" else typed["multi_gpu"]
        raise ConfigError(
            "this machine has no accelerator",
            where=f"flag {flag}",
            do="give --num_processes N to run N processes on the CPU",
        )
    if asked in _WORDS:
        # As torchrun: auto is one for each accelerator, on a machine without one for each core.
        return (os.cpu_count() or 1) if asked == "cpu" or num_accelerators == 0 else num_accelerators
    number = resolved.value.num_processes
    if number is None:
        return max(1, num_accelerators)
    if 0 < num_accelerators < number:
        raise ConfigError(
            f"{number} processes, but this machine has {num_accelerators} accelerators",
            where=str(resolved.origins["num_processes"]),
            do=f"give at most {num_accelerators}, or --cpu to run all of them on the CPU",
        )
    return number


def _outputs(flags: dict[str, Any], num_processes: int) -> Outputs:
    tee, redirects = flags["tee"], flags["redirects"]
    if redirects is not None and flags["log_dir"] is None:
        raise ConfigError("--redirects needs a place for the files", where="flag --redirects", do="add --log_dir DIR")
    if flags["log_dir"] is not None and tee is None and redirects is None:
        tee = "3"
    return Outputs(
        tee=parse_streams(tee or "0", num_processes=num_processes, flag="--tee"),
        redirect=parse_streams(redirects or "0", num_processes=num_processes, flag="--redirects"),
    )


@contextmanager
def _directory(log_dir: str | None) -> Iterator[Path]:
    """Yield a new folder: below ``log_dir`` to stay, else a temporary one."""
    if log_dir is None:
        path = Path(tempfile.mkdtemp(prefix="echelon-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return
    path = Path(log_dir).absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the log folder {path}: {error.strerror}",
            where="flag --log_dir",
            do="name a folder that you can write to",
        ) from error
    yield path


def _say_notes(resolved: Resolved[RunConfig], variables: dict[str, str], threads: int | None) -> None:
    for lost in resolved.shadowed:
        winner = getattr(resolved.value, lost.name)
        print(
            f"echelon: {lost.name}={winner!r} (from {lost.winner}) overrides {lost.value!r} (from {lost.origin})",
            file=sys.stderr,
        )
    if threads is None and "OMP_NUM_THREADS" in variables:
        print(
            "echelon: OMP_NUM_THREADS=1 for each process; --num_cpu_threads_per_process N changes it", file=sys.stderr
        )


def _say_interrupted(stop: Interrupted) -> int:
    name = signal.Signals(stop.number).name
    error = LaunchError(
        f"stopped by {name}: every process has ended",
        where=f"the launcher (process {os.getpid()})",
        do="nothing is left over; start it again with the same command",
    )
    print(f"echelon: {error}", file=sys.stderr)
    return 128 + stop.number
