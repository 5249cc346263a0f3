"""``echelon submit``: submits a training job to Slurm or Kubernetes, or prints its batch script or manifest."""

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
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.launch.schedulers.kubernetes import PodJob, objects, token_secret
from echelon.launch.schedulers.slurm_script import BatchJob, batch_script
from echelon.launch.script import Script, check

_SETTINGS = {"allow_interspersed_args": False}  # all arguments after SCRIPT are passed to it


@click.group("submit")
def command() -> None:
    """Submit a training job to a cluster; see docs/clusters.md.

    On each machine, echelon launch starts the processes. The cluster provides the rendezvous address.
    """


# The options common to all clusters.
_COMMON = (
    click.Argument(["script"], metavar="SCRIPT"),
    click.Argument(["args"], nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]..."),
    click.Option(
        ["--num-machines", "--nodes", "nodes"],
        metavar="N",
        type=click.IntRange(min=1),
        default=1,
        help="Number of machines (default: 1).",
    ),
    click.Option(
        ["--nproc-per-node"],
        type=click.IntRange(min=1),
        metavar="N",
        help="Processes per machine (default: --gpus_per_node, else 1).",
    ),
    click.Option(["--gpus-per-node"], type=click.IntRange(min=0), metavar="N", help="GPUs per machine."),
    click.Option(["--mem"], metavar="SIZE", help="Memory per machine."),
    click.Option(
        ["--env"], multiple=True, metavar="NAME=VALUE", help="Set an environment variable of the job; repeatable."
    ),
    click.Option(
        ["--launch-args"],
        default="",
        metavar="TEXT",
        help="Additional flags for echelon launch, such as '--parity exact'.",
    ),
    click.Option(["-m", "--module"], is_flag=True, help="Run SCRIPT as a module, as python -m does."),
    click.Option(["--no-python"], is_flag=True, help="Run SCRIPT as a program, without Python."),
    click.Option(
        ["--output"], metavar="FILE", help="Write the batch script or manifest to FILE without submitting it."
    ),
)


@command.command("slurm", params=[*_COMMON], context_settings=_SETTINGS)
@click.option(
    "--cpus-per-task",
    type=click.IntRange(min=1),
    metavar="N",
    help="CPUs for the launcher and all of its processes; with --direct, CPUs per process.",
)
@click.option("--partition", "-p", metavar="NAME", help="Partition of the job.")
@click.option("--account", "-A", metavar="NAME", help="Account to charge.")
@click.option("--qos", "-q", metavar="NAME", help="Quality of service.")
@click.option("--constraint", "-C", metavar="TEXT", help="Required features of the machines.")
@click.option("--time", "-t", metavar="TIME", help="Time limit each time the job runs, such as 12:00:00.")
@click.option("--job-name", "-J", metavar="NAME", help="Name of the job (default: the name of SCRIPT).")
@click.option(
    "--log-dir",
    metavar="DIR",
    default=".",
    help="Write output to DIR/NAME-ID.out; DIR must be on a shared file system (default: current directory).",
)
@click.option(
    "--requeue/--no-requeue",
    default=True,
    help="Requeue the job when it is preempted or is about to reach its time limit (default: yes).",
)
@click.option(
    "--signal",
    metavar="USR1@SECONDS",
    default="USR1@120",
    help="Signal that makes the job save and exit, sent SECONDS before the time limit, or 'none' (default: USR1@120).",
)
@click.option(
    "--setup",
    multiple=True,
    metavar="TEXT",
    help="Shell command to run before the job, such as 'source venv/bin/activate'; repeatable.",
)
@click.option(
    "--python", metavar="FILE", help="Python interpreter (default: the current one, or python if --setup is given)."
)
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="Option to pass to sbatch, such as --exclusive; repeatable.",
)
@click.option("--srun", multiple=True, metavar="OPTIONS", help="Options to pass to srun; repeatable.")
@click.option("--direct", is_flag=True, help="Start each rank as an srun task, without echelon launch.")
@click.option("--dry-run", is_flag=True, help="Print the batch script without submitting it.")
@click.pass_context
def slurm(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT as a Slurm batch job.

    Before its time limit, the job saves a checkpoint and requeues itself, and then resumes from the last checkpoint.
    """
    wanted = _script(script, args, flags)
    check(wanted)  # the machines of the cluster share these files
    launch_args, grace = _launch_args(ctx, flags)
    if flags["direct"] and launch_args:
        raise ConfigError(
            _("--launch_args requires echelon launch, which --direct does not use"),
            where="flags",
            do=_("remove one of them"),
        )
    folder = Path(flags["log_dir"]).absolute()
    job = BatchJob(
        script=wanted,
        python=flags["python"] or ("python" if flags["setup"] else sys.executable),
        name=flags["job_name"] or _stem(script),
        log_folder=str(folder),
        processes=_processes(flags),
        gpus=flags["gpus_per_node"],
        cpus_per_task=flags["cpus_per_task"],
        memory=flags["mem"],
        is_requeued=flags["requeue"],
        signal=None if flags["signal"] == "none" else flags["signal"].upper().replace("SIG", ""),
        preemption_grace_s=grace,
        variables=_variables(flags),
        launch_args=launch_args,
        sbatch_options=flags["sbatch"],
        srun_options=tuple(word for text in flags["srun"] for word in shlex.split(text)),
        is_direct=flags["direct"],
        **{name: flags[name] for name in ("nodes", "time", "partition", "account", "qos", "constraint", "setup")},
    )
    text = batch_script(job)
    if "%" in (flags["output"] or ""):
        raise ConfigError(
            _("{output}: --output names the file for the batch script and cannot contain %", output=flags["output"]),
            where="flag --output",
            do=_("set the job's output folder with --log_dir DIR"),
        )
    _one_of(flags, "dry_run", "output")
    if flags["dry_run"] or flags["output"]:
        _show(text, flags["output"])
        return
    folder.mkdir(parents=True, exist_ok=True)  # without this folder, sbatch accepts the job, but its output is lost
    answer = _run(
        ["sbatch", "--parsable"],
        text,
        _("run this on a login node of the cluster, or pass --dry_run to print the script without submitting it"),
    )
    number = answer.strip().partition(";")[0]
    path = f"{folder}/{job.name}-{number}.out"
    click.echo(_("submitted job {number}; its output goes to {path}", number=number, path=path))


@command.command("kubernetes", params=[*_COMMON], context_settings=_SETTINGS)
@click.option(
    "--image",
    required=True,
    metavar="IMAGE",
    help="Container image with Python, echelon and SCRIPT; SCRIPT may also be on a volume.",
)
@click.option("--name", metavar="NAME", help="Name of the job (default: the name of SCRIPT).")
@click.option(
    "--kind",
    type=click.Choice(["job", "trainjob"]),
    default="job",
    help="Kind of object: an Indexed Job, or a Kubeflow Trainer 2.2 TrainJob (default: job).",
)
@click.option("--runtime", default="torch-distributed", metavar="NAME", help="ClusterTrainingRuntime of a TrainJob.")
@click.option("--namespace", "-n", metavar="NAME", help="Namespace of the job.")
@click.option("--cpus", metavar="N", help="CPUs per machine.")
@click.option(
    "--gpu-resource",
    default="nvidia.com/gpu",
    metavar="NAME",
    help="Resource name of a GPU (default: nvidia.com/gpu).",
)
@click.option("--shm-size", metavar="SIZE", help="Size limit of /dev/shm.")
@click.option(
    "--volume",
    multiple=True,
    metavar="CLAIM:PATH",
    help="Mount the PersistentVolumeClaim CLAIM at PATH, for example to store checkpoints; repeatable.",
)
@click.option(
    "--secret",
    metavar="NAME",
    help="Secret whose 'token' key contains the machines' shared token (default: NAME-token).",
)
@click.option(
    "--user",
    metavar="N",
    type=click.IntRange(min=0),
    default=1000,
    help="User ID in the pods; 0 uses the image's user, which may be root (default: 1000).",
)
@click.option(
    "--grace",
    type=click.IntRange(min=1),
    default=120,
    metavar="SECONDS",
    help="Seconds between SIGTERM and SIGKILL (default: 120).",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=3,
    metavar="N",
    help="Maximum number of times to restart a failed run (default: 3).",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(1, 65535),
    default=29500,
    help="Rendezvous port on the first machine (default: 29500).",
)
@click.option("--python", default="python", metavar="FILE", help="Python interpreter in the image (default: python).")
@click.option("--apply", is_flag=True, help="Create the Secret and pass the manifest to kubectl apply.")
@click.pass_context
def kubernetes(ctx: click.Context, /, script: str, args: tuple[str, ...], **flags: Any) -> None:
    """Run SCRIPT (a path in the image) in Kubernetes pods: print the manifest, or pass it to kubectl.

    The manifest never contains the machines' shared secret.
    """
    launch_args, grace = _launch_args(ctx, flags)
    name = flags["name"] or re.sub(r"[^a-z0-9]+", "-", _stem(script).lower()).strip("-")
    same = ("image", "nodes", "gpu_resource", "cpus", "namespace", "user", "retries", "port", "python", "runtime")
    job = PodJob(
        name=name,
        script=_script(script, args, flags),
        processes=_processes(flags),
        gpus=flags["gpus_per_node"] or 0,
        memory=flags["mem"],
        shared_memory=flags["shm_size"],
        volumes=tuple(_pair(text, ":", "--volume") for text in flags["volume"]),
        variables=_variables(flags),
        secret=flags["secret"] or f"{name}-token",
        preemption_grace_s=grace,
        grace_s=flags["grace"],
        launch_args=launch_args,
        **{field: flags[field] for field in same},
    )
    import yaml  # noqa: PLC0415 - Slurm does not need it

    text = yaml.safe_dump_all(objects(job, flags["kind"]), sort_keys=False)
    _one_of(flags, "apply", "output")
    if flags["apply"]:
        _apply(job, text)
        return
    _show(text, flags["output"])
    if job.nodes > 1:
        text = N_(
            "the machines read the 'token' key of Secret {secret}; create it with --apply, or with: echelon token FILE; kubectl "
            "create secret generic {secret} --from-file=token=FILE"
        )
        say(_(text, secret=job.secret))


def _apply(job: PodJob, text: str) -> None:
    where = [] if job.namespace is None else ["--namespace", job.namespace]
    advice = _("where kubectl can reach the cluster, or omit --apply to print the manifest")
    if job.nodes > 1:
        there = _run(
            ["kubectl", "get", "secret", job.secret, *where, "--ignore-not-found", "--output=name"], "", advice
        )
        if not there.strip():
            import json  # noqa: PLC0415 - needed only here
            import secrets  # noqa: PLC0415 - needed only here

            # kubectl apply would store a copy of the secret in an annotation.
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
            _("--{one} and --{other} are mutually exclusive", one=one, other=other),
            where=f"flags --{one}, --{other}",
            do=_("remove one of them"),
        )


def _processes(flags: dict[str, Any]) -> int:
    processes, gpus = flags["nproc_per_node"], flags["gpus_per_node"]
    if processes is not None and gpus and processes > gpus:
        raise ConfigError(
            _("{processes} processes per machine were requested, but only {gpus} GPUs", processes=processes, gpus=gpus),
            where="flags --nproc_per_node, --gpus_per_node",
            do=_("use at most one process per GPU"),
        )
    return int(processes or gpus or 1)


def _variables(flags: dict[str, Any]) -> dict[str, str]:
    return dict(_pair(text, "=", "--env") for text in flags["env"])


def _pair(text: str, sign: str, flag: str) -> tuple[str, str]:
    name, found, value = text.partition(sign)
    if not found or not name:
        raise ConfigError(
            _("{text!r} has no {sign!r}", text=text, sign=sign),
            where=_("flag {name}", name=flag),
            do=_("use NAME{sign}VALUE", sign=sign),
        )
    return name, value


def _launch_args(ctx: click.Context, flags: dict[str, Any]) -> tuple[tuple[str, ...], float]:
    """Check the flags for ``echelon launch`` before the job starts; return them and the preemption grace in seconds."""
    from echelon.cli.launch import command as launch  # noqa: PLC0415 - needed only here

    words = shlex.split(flags["launch_args"])
    parsed = launch.make_context("launch", [*words, "SCRIPT"], parent=ctx)
    if parsed.params["script"] != "SCRIPT":
        raise ConfigError(
            _("{params!r} is not a flag of echelon launch", params=parsed.params["script"]),
            where="flag --launch_args",
            do=_("pass the script's arguments after SCRIPT"),
        )
    return tuple(words), float(parsed.params["preemption_grace"])


def _stem(script: str) -> str:
    return PurePosixPath(script).stem


def _show(text: str, file: str | None) -> None:
    if file is None:
        click.echo(text, nl=False)
    else:
        Path(file).write_text(text, encoding="utf-8")
        click.echo(_("wrote {file}", file=file), err=True)


def _run(argv: list[str], text: str, advice: str) -> str:
    """Run a cluster command with ``text`` as its standard input, and return its output."""
    program = argv[0]
    if shutil.which(program) is None:
        raise LaunchError(
            _("{program} is not installed on this machine", program=program),
            where=_("PATH of {nodename}", nodename=os.uname().nodename),
            do=advice,
        )
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip() or "no output"
        raise LaunchError(
            _(
                "{program} failed (exit code {returncode}): {output}",
                program=program,
                returncode=done.returncode,
                output=output,
            ),
            where=shlex.join(argv),
            do=_("fix the problem that {program} reports", program=program),
        )
    return done.stdout
