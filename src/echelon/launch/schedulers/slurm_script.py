"""The batch script that ``echelon submit slurm`` writes.

The job starts one launcher per machine or, if ``is_direct``, one task per rank:

* Slurm sends the ``--signal`` to the tasks before the time limit. They save and exit with code 143 (docs/preemption.md), and
  the script requeues the job. If Slurm itself ends the job (preemption, requeue, scancel, time limit), the script also receives
  SIGTERM and does not requeue.
* A task that exits early must not stop the other tasks, which may be saving. The launchers report failures to each other.
* The launchers on different machines share a secret. The script creates a new one at each start, in a file that only its user can
  read. No argument list, environment variable or script contains it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.launch.job_token import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from echelon.launch.script import Script
from echelon.status.stop_barrier import EXIT_CODE

# How long ranks without a launcher may run after the first one has exited. The last save of rank 0 takes less.
WAIT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """Options of the job."""

    script: Script
    python: str
    """Python interpreter on the cluster's machines."""
    name: str
    log_folder: str
    """Absolute path on a shared disk, which also holds the token file."""
    nodes: int = 1
    processes: int = 1
    """Number of processes per machine."""
    gpus: int | None = None
    """Number of GPUs per machine."""
    cpus_per_task: int | None = None
    memory: str | None = None
    """Memory per machine, in the same format as sbatch's ``--mem``."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    is_requeued: bool = True
    signal: str | None = "USR1@120"
    """Signal (USR1 or TERM) and number of seconds before the time limit, in the same format as sbatch's ``--signal``,
    or None."""
    preemption_grace_s: float
    """How long the ranks may take to agree on a step (``echelon launch --preemption_grace``)."""
    variables: Mapping[str, str]
    setup: tuple[str, ...] = ()
    """Shell lines to run before the job."""
    launch_args: tuple[str, ...] = ()
    """Additional flags for ``echelon launch``."""
    sbatch_options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    is_direct: bool = False


def batch_script(job: BatchJob) -> str:
    """Return the script for ``sbatch``.

    Raises:
        ConfigError: Slurm would reject a value, or the job would receive the signal too early or too late.
    """
    _check(job)
    parts = [
        "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job))]),
        "# Written by echelon submit slurm. Each start resumes from the last checkpoint.",
        "\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()),
        "\n".join(["set -e", *job.setup, "set +e"]) if job.setup else "",
        f"logs={shlex.quote(job.log_folder)}\n{_TOKEN}" if job.nodes > 1 and not job.is_direct else "",
        _TRAP_TERM,
        f"{' '.join(_command(job))}\ncode=$?",
        _REQUEUE if job.is_requeued else "",
        'exit "$code"',
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_TRAP_TERM = """\
# Slurm sends SIGTERM to this script when it ends the job. Without a trap, the script and its tasks would exit immediately.
ended=
trap 'ended=yes' TERM"""

_REQUEUE = f"""\
if [ "$code" -eq {EXIT_CODE} ] && [ -z "$ended" ]; then
    echo "echelon: preempted: requeueing this job" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi"""

# The secret passes through pipes only, because others can see arguments and variables. mktemp creates the file with mode 0600.
_TOKEN = f"""\
# The launchers share a secret, new at each start. Remove the file of a start that was killed.
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
        "open-mode": "append",  # later starts must not truncate the file
        "signal": job.signal,
    }
    # sbatch parses quotes like a shell.
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None]
    return [*options, "--requeue" if job.is_requeued else "--no-requeue", *job.sbatch_options]


def _command(job: BatchJob) -> list[str]:
    """Return the srun command as quoted words."""
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
    # Since Slurm 22.05, srun does not inherit this option from the job.
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
                _("{text!r} contains a line break or control character", text=text),
                where=_("flag {name}", name=flag),
                do=_("remove it"),
            )
    if job.name.startswith("-") or not job.name:
        raise ConfigError(
            _("{job!r} is not a valid job name", job=job.name),
            where=_("flag {name}", name="--job_name"),
            do=_("start it with a letter"),
        )
    _check_form("--mem", job.memory, r"\d+[KMGT]?", _("use a number with an optional K, M, G or T suffix, such as 64G"))
    _check_form("--time", job.time, _TIME, _("use minutes, hours:minutes:seconds or days-hours, such as 12:00:00"))
    _check_form("--signal", job.signal, r"(USR1|TERM)@\d{1,5}", _("use USR1@SECONDS, TERM@SECONDS or none"))
    for name in job.variables:
        _check_form("--env", name, r"[A-Z_a-z]\w*", _("use NAME=VALUE with letters, digits and _ in NAME"))
    if job.signal is None:
        return
    before, seconds = int(job.signal.partition("@")[2]), _seconds(job.time or "")
    if before <= job.preemption_grace_s:
        raise ConfigError(
            _(
                "the signal is sent {before} s before the time limit, but the ranks may take {preemption_grace_s:g} "
                "s to agree on a step",
                before=before,
                preemption_grace_s=job.preemption_grace_s,
            ),
            where=_("flag {name}", name="--signal"),
            do=_(
                "use more than {preemption_grace_s:g} s plus the time that a save takes",
                preemption_grace_s=job.preemption_grace_s,
            ),
        )
    if seconds is not None and before >= seconds:
        raise ConfigError(
            _(
                "with a time limit of {seconds} s and a signal {before} s before it, the job would be requeued as "
                "soon as it starts",
                seconds=seconds,
                before=before,
            ),
            where=_("flags --time, --signal"),
            do=_("increase --time, or use --signal none"),
        )


_TIME = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE"


def _check_form(flag: str, text: str | None, form: str, do: str) -> None:
    if text is not None and re.fullmatch(form, text, flags=re.IGNORECASE | re.ASCII) is None:
        raise ConfigError(
            _("{text!r} is not a valid value for Slurm", text=text), where=_("flag {name}", name=flag), do=do
        )


def _seconds(time: str) -> int | None:
    """Return an sbatch time limit in seconds, or None for unlimited."""
    days, dash, rest = time.rpartition("-")
    if not rest.replace(":", "").isdigit():
        return None
    parts = [int(part) for part in rest.split(":")]
    # minutes, minutes:seconds or hours:minutes:seconds; after days-: hours, hours:minutes, ...
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
