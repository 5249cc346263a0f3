"""The batch script with which Slurm runs a training: made from the choices of ``echelon submit slurm``.

The job starts one launcher on each machine, or with ``is_direct`` one task for each rank. What it must get right:

* ``--signal`` reaches the tasks some time before the job's own is over: they save and end with 143 (docs/preemption.md), and the
  script puts its job back into the queue. When Slurm itself ends the job (preemption, requeue, scancel, time over), the script gets
  SIGTERM, too, and leaves to Slurm what becomes of it.
* A task that ends early must not take the others with it: they may be saving. The launchers tell each other of failures.
* Launchers of several machines share a secret. The script makes one for each start, in a file that only its user can read; it is in
  no argument list, in no environment, and not in the script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.base.errors import ConfigError
from echelon.launch.multinode.job_token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from echelon.launch.script import Script
from echelon.status.stop_barrier import EXIT_CODE

__all__ = ["WAIT_S", "BatchJob", "batch_script"]

# Ranks without a launcher: so long after the first has ended the others are, too; a last save of rank zero takes less.
WAIT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """What the user chose."""

    script: Script
    python: str
    """The interpreter on the machines of the cluster."""
    name: str
    log_folder: str
    """Absolute, and seen by all machines; the token's file is here, too."""
    nodes: int = 1
    processes: int = 1
    """On each machine."""
    gpus: int | None = None
    """Of each machine."""
    cpus_per_task: int | None = None
    memory: str | None = None
    """Of each machine, as ``--mem`` of sbatch."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    is_requeued: bool = True
    signal: str | None = "USR1@120"
    """As ``--signal`` of sbatch: USR1 or TERM, and how many seconds before the end; None: none."""
    preemption_grace_s: float
    """What the ranks have to come to one step (``echelon launch --preemption_grace``)."""
    variables: Mapping[str, str]
    setup: tuple[str, ...] = ()
    """Lines of shell before the training starts."""
    launch_args: tuple[str, ...] = ()
    """More flags of ``echelon launch``."""
    sbatch_options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    is_direct: bool = False


def batch_script(job: BatchJob) -> str:
    """Return the text for ``sbatch``.

    Raises:
        ConfigError: a value that Slurm would not take, or a signal that comes as soon as the job starts.
    """
    _check(job)
    parts = [
        "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job))]),
        "# Written by echelon submit slurm. Each start goes on from the last checkpoint.",
        "\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()),
        "\n".join(["set -e", *job.setup, "set +e"]) if job.setup else "",
        f"logs={shlex.quote(job.log_folder)}\n{_TOKEN}" if job.nodes > 1 and not job.is_direct else "",
        _NOTE_END,
        f"{' '.join(_command(job))}\ncode=$?",
        _REQUEUE if job.is_requeued else "",
        'exit "$code"',
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_NOTE_END = """\
# SIGTERM comes to this script when Slurm itself ends the job. Without a trap it would end at once, and the tasks with it.
ended=
trap 'ended=yes' TERM"""

_REQUEUE = f"""\
if [ "$code" -eq {EXIT_CODE} ] && [ -z "$ended" ]; then
    echo "echelon: asked to end, and saved: this job goes back into the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi"""

# By pipes: what is an argument or a variable can be seen by others. mktemp makes the file, with mode 0600, or fails.
_TOKEN = f"""\
# The launchers know each other by a secret, new at each start. A start that was killed has left its own.
rm -f -- "$logs/.token-$SLURM_JOB_ID."*
unset {TOKEN_VARIABLE}
{TOKEN_FILE_VARIABLE}=$(mktemp "$logs/.token-$SLURM_JOB_ID.XXXXXXXX") || exit
export {TOKEN_FILE_VARIABLE}
trap 'rm -f -- "${TOKEN_FILE_VARIABLE}"' EXIT
head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > "${TOKEN_FILE_VARIABLE}\""""


def _options(job: BatchJob) -> list[str]:
    tasks = job.processes if job.is_direct else 1
    pattern = job.log_folder.replace("%", "%%") + "/%x-%j.out"
    values = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": job.gpus,
        "cpus-per-task": job.cpus_per_task,
        "mem": job.memory,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "output": pattern,
        "open-mode": "append",  # a start after the first must not empty the file
        "signal": job.signal,
    }
    # sbatch reads quotes as a shell does.
    told = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None]
    return [*told, "--requeue" if job.is_requeued else "--no-requeue", *job.sbatch_options]


def _command(job: BatchJob) -> list[str]:
    """Return the words of the srun line, quoted."""
    script = job.script
    target = ["-m", script.target] if script.kind == "module" else [script.target]
    if job.is_direct:
        run = [f"--wait={WAIT_S}"]
        words = [*([] if script.kind == "program" else [job.python]), *target, *script.args]
    else:
        run = ["--ntasks-per-node=1", "--wait=0"]
        no_python = ["--no_python"] if script.kind == "program" else []
        words = [job.python, "-m", "echelon", "launch", "--nproc_per_node", str(job.processes)]
        words += [*job.launch_args, *no_python, *target, *script.args]
    # Since Slurm 22.05 srun does not take it from the job.
    cpus = [f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task is not None else []
    return ["srun", "--kill-on-bad-exit=0", *run, *cpus, *map(shlex.quote, [*job.srun_options, *words])]


def _check(job: BatchJob) -> None:
    texts = {
        "--job_name": job.name,
        "--partition": job.partition,
        "--account": job.account,
        "--qos": job.qos,
        "--constraint": job.constraint,
        "--log_dir": job.log_folder,
        "--sbatch": " ".join(job.sbatch_options),
        "--srun": " ".join(job.srun_options),
    }
    for flag, text in texts.items():
        if text is not None and not text.isprintable():
            raise ConfigError(
                f"{text!r} has a line break or a control character", where=f"flag {flag}", do="leave it out"
            )
    if job.name.startswith("-") or not job.name:
        raise ConfigError(f"{job.name!r} is no name of a job", where="flag --job_name", do="begin it with a letter")
    _check_form("--mem", job.memory, r"\d+[KMGT]?", "give a number and K, M, G or T, such as 64G")
    _check_form("--time", job.time, _TIME, "give minutes, hours:minutes:seconds or days-hours, such as 12:00:00")
    _check_form("--signal", job.signal, r"(USR1|TERM)@\d{1,5}", "give USR1@SECONDS, TERM@SECONDS or none")
    for name in job.variables:
        _check_form("--env", name, r"[A-Z_a-z]\w*", "give NAME=VALUE, NAME of letters, digits and _")
    if job.signal is None:
        return
    before, seconds = int(job.signal.partition("@")[2]), _seconds(job.time or "")
    if before <= job.preemption_grace_s:
        raise ConfigError(
            f"asked to end {before} s before the end, and the ranks may take {job.preemption_grace_s:g} s to come to one step",
            where="flag --signal",
            do=f"give more than {job.preemption_grace_s:g} s, and the time that a checkpoint takes",
        )
    if seconds is not None and before >= seconds:
        raise ConfigError(
            f"a job of {seconds} s that is asked to end {before} s before its end only starts, and goes back into the queue",
            where="flags --time, --signal",
            do="give it more time, or --signal none: it is not asked",
        )


_TIME = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE"


def _check_form(flag: str, text: str | None, form: str, do: str) -> None:
    if text is not None and re.fullmatch(form, text, flags=re.IGNORECASE | re.ASCII) is None:
        raise ConfigError(f"{text!r} is not what Slurm takes", where=f"flag {flag}", do=do)


def _seconds(time: str) -> int | None:
    """Return what a time of sbatch's says; None: it has no end."""
    days, dash, rest = time.rpartition("-")
    if not rest.replace(":", "").isdigit():
        return None
    parts = [int(part) for part in rest.split(":")]
    # minutes, minutes:seconds, hours:minutes:seconds; after days: hours, hours:minutes, ...
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
