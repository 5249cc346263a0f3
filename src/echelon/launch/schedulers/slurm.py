"""The Slurm step that started this launcher: number of machines, machine rank and the first machine's address."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.world.environment import integer, slurm_first_host, slurm_port, slurm_tasks_by_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A Slurm step in which ``srun`` starts one launcher per machine."""

    num_nodes: int
    node_rank: int
    head: str
    """The first machine's name."""
    job_id: int
    step_id: int
    port: int
    """MASTER_PORT, or a port derived from the job and step ids."""


def current_step() -> Step | None:
    """Return the ``srun`` step that started this launcher, or None if srun did not start it.

    Raises:
        ConfigError: srun starts several launchers per machine, or a Slurm variable is missing or invalid.
    """
    # sbatch and salloc also set most of these variables for their shell; only srun sets the step id.
    if environ.get("SLURM_STEP_ID") is None or environ.get("SLURM_NODEID") is None:
        return None
    num_nodes = integer("SLURM_STEP_NUM_NODES" if environ.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES", 1)
    node_rank = integer("SLURM_NODEID")
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(
            _(
                "machine {node_rank} (from env SLURM_NODEID) is not in 0..{count} (from env SLURM_STEP_NUM_NODES)",
                node_rank=node_rank,
                count=num_nodes - 1,
            ),
            where=_("env {name}", name="SLURM_NODEID"),
            do=_("start the launcher directly with srun, and do not change the SLURM_ variables"),
        )
    # Check all machines: if the launchers of another one exited, this one would wait for them.
    tasks = slurm_tasks_by_node() or [1] * num_nodes
    if max(tasks) > 1:
        raise ConfigError(
            _(
                "srun starts {tasks} launchers on one machine, each of which would start all the machine's ranks",
                tasks=max(tasks),
            ),
            where=_("env {name}", name="SLURM_STEP_TASKS_PER_NODE"),
            do=_(
                "run `srun --ntasks-per-node=1 echelon launch --nproc_per_node K script.py`, or start one task per "
                "rank without the launcher: `srun python script.py`"
            ),
        )
    head = slurm_first_host()
    if head is None:
        if num_nodes > 1:
            raise ConfigError(
                _("SLURM_STEP_NODELIST, which should list the {num_nodes} machines, is not set", num_nodes=num_nodes),
                where=_("env {name}", name="SLURM_STEP_NODELIST"),
                do=_("keep the SLURM_ variables, or set --main_process_ip and --machine_rank"),
            )
        head = "127.0.0.1"
    return Step(
        num_nodes=num_nodes,
        node_rank=node_rank,
        head=head,
        job_id=integer("SLURM_JOB_ID", 0),
        step_id=integer("SLURM_STEP_ID"),
        port=slurm_port(),
    )
