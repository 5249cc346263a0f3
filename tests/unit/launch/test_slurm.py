"""current_step(): what a launcher learns from srun's variables."""

from __future__ import annotations

import pytest

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.launch.schedulers.slurm import Step, current_step

CLEAN = dict.fromkeys(name for name in environ.snapshot() if name.startswith(("SLURM_", "MASTER_")))
# As srun of Slurm 22.05 sets them for the second of three machines.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_STEP_NODELIST": "r[1-2]n[03-04]",
    "SLURM_NNODES": "4",  # the job has one more
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
}


def _step(variables: dict[str, str], without: str = "") -> Step | None:
    left = {name: value for name, value in {**SRUN, **variables}.items() if name != without}
    with environ.patch({**CLEAN, **left}):
        return current_step()


def test_a_launcher_reads_its_position_from_srun() -> None:
    assert _step({}) == Step(
        num_nodes=3,
        node_rank=1,
        head="r1n03",
        job_id=4711,
        step_id=2,
        port=15000 + (4711 * 16 + 2) % 15000,
    )
    found = _step({"MASTER_PORT": "29500"})
    assert found is not None
    assert found.port == 29500


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_NODEID"])
def test_a_batch_script_and_a_plain_shell_are_not_steps(missing: str) -> None:
    assert _step({}, missing) is None


def test_one_machine_needs_no_list_of_them() -> None:
    found = _step({"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, "SLURM_STEP_NODELIST")
    assert found is not None
    assert (found.num_nodes, found.head) == (1, "127.0.0.1")


@pytest.mark.parametrize(
    ("variables", "without", "what", "do"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1,4(x2)"}, "", "4 launchers on one machine", "srun --ntasks-per-node=1"),
        ({"SLURM_NODEID": "$SLURM_NODEID"}, "", "SLURM_NODEID='$SLURM_NODEID'", "was not expanded by a shell"),
        ({"SLURM_NODEID": "3"}, "", "machine 3 (from env SLURM_NODEID) is not in 0..2", "directly with srun"),
        ({"MASTER_PORT": "auto"}, "", "MASTER_PORT='auto' is not an integer", "set MASTER_PORT to an integer"),
        (
            {},
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_NODELIST, which should list the 3 machines, is not set",
            "--main_process_ip",
        ),
    ],
)
def test_invalid_values_raise(variables: dict[str, str], without: str, what: str, do: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _step(variables, without)
    assert what in caught.value.what
    assert do in str(caught.value.do)
