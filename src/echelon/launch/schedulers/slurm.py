"""The Slurm step of this launcher: number of machines, rank of this one, address of the first."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.world.environment import integer, slurm_first_host, slurm_port, slurm_tasks_by_node

__all__ = ["Step", "current_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What ``srun`` started: one launcher per machine."""

    num_nodes: int
    node_rank: int
    head: str
    """The name of the first machine."""
    job_id: int
    step_id: int
    tasks_here: int
    """Number of tasks on this machine: 1, the launcher."""
    port: int
    """MASTER_PORT, else derived from the job and step ids."""


def current_step() -> Step | None:
    """Return the ``srun`` step that started this launcher; None: it was started by hand or in a batch script.

    Raises:
        ConfigError: srun starts several launchers per machine, or a variable of Slurm is missing or not a number.
    """
    # sbatch and salloc set most of these for their shell, too; only srun sets the step id.
    if environ.get("SLURM_STEP_ID") is None or environ.get("SLURM_NODEID") is None:
        return None
    num_nodes = integer("SLURM_STEP_NUM_NODES" if environ.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES", 1)
    node_rank = integer("SLURM_NODEID")
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(
            f"machine {node_rank} (from env SLURM_NODEID) is outside 0..{num_nodes - 1} (from env SLURM_STEP_NUM_NODES)",
            where="env SLURM_NODEID",
            do="start the launcher directly with srun, and do not change the SLURM_ variables",
        )
    # Check the other machines, too: their launchers would exit, and this one would wait for them.
    tasks = slurm_tasks_by_node() or [1] * num_nodes
    if max(tasks) > 1:
        raise ConfigError(
            f"srun starts {max(tasks)} launchers on one machine, and each of them would start all its ranks",
            where="env SLURM_STEP_TASKS_PER_NODE",
            do="use srun --ntasks-per-node=1 echelon launch --nproc_per_node K script.py, or one task per rank without a "
            "launcher: srun python script.py",
        )
    head = slurm_first_host()
    if head is None:
        if num_nodes > 1:
            raise ConfigError(
                f"SLURM_STEP_NODELIST, with the hosts of the {num_nodes} machines, is not set",
                where="env SLURM_STEP_NODELIST",
                do="do not unset the SLURM_ variables, or give --main_process_ip and --machine_rank",
            )
        head = "127.0.0.1"
    return Step(
        num_nodes=num_nodes,
        node_rank=node_rank,
        head=head,
        job_id=integer("SLURM_JOB_ID", 0),
        step_id=integer("SLURM_STEP_ID"),
        tasks_here=tasks[node_rank] if node_rank < len(tasks) else 1,
        port=slurm_port(),
    )
