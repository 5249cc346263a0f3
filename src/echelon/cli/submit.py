"""``echelon submit``: hand a training to Slurm or Kubernetes, as a batch script or a manifest that can be read first."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import click

from echelon.base.errors import ConfigError, LaunchError
from echelon.launch.schedulers.kubernetes import PodJob, objects, token_secret
from echelon.launch.schedulers.slurm_script import BatchJob, batch_script
from echelon.launch.script import Script, check

__all__ = ["command"]

_SETTINGS = {"allow_interspersed_args": False}  # what stands after the script belongs to it


@click.group("submit")
def command() -> None:
    """Submit a training to a cluster: see docs/clusters.md.

    On each machine an echelon launch starts the processes; they find each other by what the cluster says.
    """


def _common(function: Any) -> Any:
    """Add what every cluster needs to know."""
    options = [
        click.argument("script", metavar="SCRIPT"),
        click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]..."),
        click.option("--nodes", "--num-machines", type=click.IntRange(min=1), default=1, help="Machines. Default 1."),
        click.option(
            "--nproc-per-node",
            type=click.IntRange(min=1),
            metavar="N",
            help="Processes on each machine. Default: --gpus-per-node, else 1.",
        ),
        click.option("--gpus-per-node", type=click.IntRange(min=0), metavar="N", help="GPUs of each machine."),
        click.option("--mem", metavar="SIZE", help="Memory of each machine."),
        click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable of the job; may be given again."),
        click.option(
            "--launch-args", default="", metavar="TEXT", help="More flags of echelon launch, such as '--parity exact'."
        ),
        click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."),
        click.option("--no-python", is_flag=True, help="SCRIPT is a program that is run as it is."),
        click.option("--output", metavar="FILE", help="Write it to FILE, and submit nothing."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@command.command("slurm", context_settings=_SETTINGS)
@_common
@click.option(
    "--cpus-per-task",
    type=click.IntRange(min=1),
    metavar="N",
    help="Of the launcher with all its processes; with --direct, of each.",
)
@click.option("--partition", "-p", metavar="NAME")
@click.option("--account", "-A", metavar="NAME")
@click.option("--qos", "-q", metavar="NAME")
@click.option("--constraint", "-C", metavar="TEXT", help="Features that the machines must have.")
@click.option("--time", "-t", metavar="TIME", help="How long one start may run, such as 12:00:00.")
@click.option("--job-name", "-J", metavar="NAME", help="Default: the name of SCRIPT.")
@click.option(
    "--log-dir",
    metavar="DIR",
    default=".",
    help="Output goes to DIR/NAME-ID.out; all machines must see DIR. Default: here.",
)
@click.option(
    "--requeue/--no-requeue", default=True, help="Go back into the queue when asked to end, or preempted. Default: yes."
)
@click.option(
    "--signal",
    metavar="USR1@SECONDS",
    default="USR1@120",
    help="Ask the job to save and end so long before its time is over; or none. Default USR1@120.",
)
@click.option(
    "--setup",
    multiple=True,
    metavar="TEXT",
    help="A line of shell before the training, such as 'source venv/bin/activate'; may be given again.",
)
@click.option("--python", metavar="PATH", help="Default: this one; after --setup, python.")
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="Another option of sbatch, such as --exclusive; may be given again.",
)
@click.option("--srun", multiple=True, metavar="OPTIONS", help="Other options of srun; may be given again.")
@click.option("--direct", is_flag=True, help="srun starts the ranks, one task each, without a launcher.")
@click.option("--dry-run", is_flag=True, help="Print the batch script, and submit nothing.")
@click.pass_context
def slurm(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT as a batch job of Slurm.

    The job saves and goes back into the queue before its time is over, and each start goes on from the last checkpoint.
    """
    wanted = _script(script, args, flags)
    check(wanted)  # the machines of the cluster see these files, too
    launch_args, grace = _launch_args(ctx, flags)
    if flags["direct"] and launch_args:
        raise ConfigError(
            "--direct starts no echelon launch that --launch_args could go to",
            where="flags",
            do="leave one of them out",
        )
    folder = Path(flags["log_dir"]).absolute()
    job = BatchJob(
        script=wanted,
        python=flags["python"] or ("python" if flags["setup"] else sys.executable),
        name=flags["job_name"] or _stem(script),
        log_folder=str(folder),
        nodes=flags["nodes"],
        processes=_processes(flags),
        gpus=flags["gpus_per_node"],
        cpus_per_task=flags["cpus_per_task"],
        memory=flags["mem"],
        time=flags["time"],
        partition=flags["partition"],
        account=flags["account"],
        qos=flags["qos"],
        constraint=flags["constraint"],
        is_requeued=flags["requeue"],
        signal=None if flags["signal"] == "none" else flags["signal"].upper().replace("SIG", ""),
        preemption_grace_s=grace,
        variables=_variables(flags),
        setup=flags["setup"],
        launch_args=launch_args,
        sbatch_options=flags["sbatch"],
        srun_options=tuple(word for text in flags["srun"] for word in shlex.split(text)),
        is_direct=flags["direct"],
    )
    text = batch_script(job)
    if "%" in (flags["output"] or ""):
        raise ConfigError(
            f"{flags['output']}: --output is where the batch script is written",
            where="flag --output",
            do="give --log_dir DIR for what the job prints",
        )
    _one_of(flags, "dry_run", "output")
    if flags["dry_run"] or flags["output"]:
        _show(text, flags["output"])
        return
    folder.mkdir(parents=True, exist_ok=True)  # sbatch takes the job all the same, and its output is lost
    answer = _run(["sbatch", "--parsable"], text, "on a login node of the cluster; --dry_run prints the script")
    number = answer.strip().partition(";")[0]
    click.echo(f"submitted job {number}; it prints to {folder}/{job.name}-{number}.out")


@command.command("kubernetes", context_settings=_SETTINGS)
@_common
@click.option("--image", required=True, metavar="IMAGE", help="With Python, echelon and SCRIPT in it (or in a volume).")
@click.option("--name", metavar="NAME", help="Of the job. Default: the name of SCRIPT.")
@click.option(
    "--kind",
    type=click.Choice(["job", "trainjob"]),
    default="job",
    help="An Indexed Job, or a TrainJob of Kubeflow Trainer 2.2. Default job.",
)
@click.option(
    "--runtime", default="torch-distributed", metavar="NAME", help="The ClusterTrainingRuntime of a TrainJob."
)
@click.option("--namespace", "-n", metavar="NAME")
@click.option("--cpus", metavar="N", help="CPUs of each machine.")
@click.option(
    "--gpu-resource",
    default="nvidia.com/gpu",
    metavar="NAME",
    help="What a GPU is called here. Default nvidia.com/gpu.",
)
@click.option("--shm-size", metavar="SIZE", help="The most that /dev/shm may take of the memory.")
@click.option(
    "--volume",
    multiple=True,
    metavar="CLAIM:PATH",
    help="A PersistentVolumeClaim, and where it is seen; may be given again. Checkpoints belong there.",
)
@click.option("--secret", metavar="NAME", help="The Secret whose key token the machines share. Default: NAME-token.")
@click.option(
    "--user",
    type=click.IntRange(min=0),
    default=1000,
    help="User id in the pods; 0: as the image says, root too. Default 1000.",
)
@click.option(
    "--grace",
    type=click.IntRange(min=1),
    default=120,
    metavar="SECONDS",
    help="Between SIGTERM and SIGKILL. Default 120.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="How often a failed run is started again. Default 3.",
)
@click.option("--port", type=click.IntRange(1, 65535), default=29500, help="Of the first machine. Default 29500.")
@click.option("--python", default="python", metavar="PATH", help="In the image. Default python.")
@click.option("--apply", is_flag=True, help="Make the Secret and hand the manifest to kubectl apply.")
@click.pass_context
def kubernetes(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT (a path in the image) on pods of Kubernetes: prints the manifest, or hands it to kubectl.

    The secret that the machines share is never part of it.
    """
    launch_args, grace = _launch_args(ctx, flags)
    name = flags["name"] or re.sub(r"[^a-z0-9]+", "-", _stem(script).lower()).strip("-")
    job = PodJob(
        name=name,
        image=flags["image"],
        script=_script(script, args, flags),
        nodes=flags["nodes"],
        processes=_processes(flags),
        gpus=flags["gpus_per_node"] or 0,
        gpu_resource=flags["gpu_resource"],
        cpus=flags["cpus"],
        memory=flags["mem"],
        shared_memory=flags["shm_size"],
        volumes=tuple(_pair(text, ":", "--volume") for text in flags["volume"]),
        variables=_variables(flags),
        namespace=flags["namespace"],
        secret=flags["secret"] or f"{name}-token",
        user=flags["user"],
        preemption_grace_s=grace,
        grace_s=flags["grace"],
        retries=flags["retries"],
        port=flags["port"],
        python=flags["python"],
        launch_args=launch_args,
        runtime=flags["runtime"],
    )
    import yaml  # noqa: PLC0415 - Slurm does not need it

    text = yaml.safe_dump_all(objects(job, flags["kind"]), sort_keys=False)
    _one_of(flags, "apply", "output")
    if flags["apply"]:
        _apply(job, text)
        return
    _show(text, flags["output"])
    if job.nodes > 1:
        click.echo(
            f"echelon: the machines share the key token of the Secret {job.secret}; --apply makes it, or: echelon token FILE; "
            f"kubectl create secret generic {job.secret} --from-file=token=FILE",
            err=True,
        )


def _apply(job: PodJob, text: str) -> None:
    where = [] if job.namespace is None else ["--namespace", job.namespace]
    advice = "where kubectl reaches the cluster; without --apply the manifest is printed"
    if job.nodes > 1:
        there = _run(
            ["kubectl", "get", "secret", job.secret, *where, "--ignore-not-found", "--output=name"], "", advice
        )
        if not there.strip():
            import json  # noqa: PLC0415 - here only
            import secrets  # noqa: PLC0415 - here only

            # create, not apply: that would keep a second copy in an annotation.
            made = json.dumps(token_secret(job, secrets.token_hex(32)))
            click.echo(_run(["kubectl", "create", *where, "--filename=-"], made, advice).rstrip())
    click.echo(_run(["kubectl", "apply", *where, "--filename=-"], text, advice).rstrip())


def _script(script: str, args: tuple[str, ...], flags: dict[str, Any]) -> Script:
    _one_of(flags, "module", "no_python")
    kind: Any = "module" if flags["module"] else "program" if flags["no_python"] else "script"
    return Script(kind=kind, target=script, args=args)


def _one_of(flags: dict[str, Any], one: str, other: str) -> None:
    if flags[one] and flags[other]:
        raise ConfigError(
            f"--{one} and --{other} exclude each other", where=f"flags --{one}, --{other}", do="give one of the two"
        )


def _processes(flags: dict[str, Any]) -> int:
    processes, gpus = flags["nproc_per_node"], flags["gpus_per_node"]
    if processes is not None and gpus and processes > gpus:
        raise ConfigError(
            f"{processes} processes on each machine, and {gpus} GPUs",
            where="flags --nproc_per_node, --gpus_per_node",
            do="give at most one process for each GPU",
        )
    return int(processes or gpus or 1)


def _variables(flags: dict[str, Any]) -> dict[str, str]:
    return dict(_pair(text, "=", "--env") for text in flags["env"])


def _pair(text: str, sign: str, flag: str) -> tuple[str, str]:
    name, found, value = text.partition(sign)
    if not found or not name:
        raise ConfigError(f"{text!r} has no {sign!r}", where=f"flag {flag}", do=f"give NAME{sign}VALUE")
    return name, value


def _launch_args(ctx: click.Context, flags: dict[str, Any]) -> tuple[tuple[str, ...], float]:
    """Return the flags for ``echelon launch``, and what it lets a preemption take; wrong ones are told here, not in the job."""
    from echelon.cli.launch import command as launch  # noqa: PLC0415 - its settings are needed for this only

    words = shlex.split(flags["launch_args"])
    parsed = launch.make_context("launch", [*words, "SCRIPT"], parent=ctx)
    if parsed.params["script"] != "SCRIPT":
        raise ConfigError(
            f"{parsed.params['script']!r} is no flag of echelon launch",
            where="flag --launch_args",
            do="put what belongs to the script behind the script",
        )
    return tuple(words), float(parsed.params["preemption_grace"])


def _stem(script: str) -> str:
    return PurePosixPath(script).stem


def _show(text: str, file: str | None) -> None:
    if file is None:
        click.echo(text, nl=False)
    else:
        Path(file).write_text(text, encoding="utf-8")
        click.echo(f"wrote {file}", err=True)


def _run(argv: list[str], text: str, advice: str) -> str:
    """Run a program of the cluster with ``text`` as its input; return what it prints."""
    program = argv[0]
    if shutil.which(program) is None:
        raise LaunchError(
            f"there is no program {program} here", where=f"PATH of {os.uname().nodename}", do=f"run this {advice}"
        )
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        told = done.stderr.strip() or done.stdout.strip() or "it said nothing"
        raise LaunchError(
            f"{program} did not take it (exit code {done.returncode}): {told}",
            where=shlex.join(argv),
            do="correct what it names",
        )
    return done.stdout
