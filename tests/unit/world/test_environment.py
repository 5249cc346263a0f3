"""detect(): torchrun's, Slurm's and MPI's variables, or a single process."""

from __future__ import annotations

import pytest

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.world.environment import LaunchEnvironment, detect

CLEAN = dict.fromkeys(
    name
    for name in environ.snapshot()
    if name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_", "MV2_", "MASTER_", "LOCAL_", "CROSS_", "GROUP_", "NODE_"))
    or name in ("RANK", "WORLD_SIZE")
)

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
}


def _detect(variables: dict[str, str]) -> LaunchEnvironment:
    with environ.patch({**CLEAN, **variables}):
        return detect()


def test_torchrun() -> None:
    found = _detect(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "h",
            "MASTER_PORT": "7",
        }
    )
    assert found == LaunchEnvironment(
        starter="torchrun",
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        master_addr="h",
        master_port=7,
    )


def test_deepspeeds_launcher_counts_the_machine_in_its_own_words() -> None:
    # As deepspeed.launcher.launch sets them for process 1 of the second of two machines with 4 each.
    found = _detect(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_SIZE": "4",
            "CROSS_RANK": "1",
            "CROSS_SIZE": "2",
            "MASTER_ADDR": "h",
            "MASTER_PORT": "29500",
        }
    )
    assert (found.rank, found.local_rank, found.local_world_size, found.node_rank) == (5, 1, 4, 1)
    assert found.world_size == 8


def test_slurm() -> None:
    found = _detect(SLURM)
    assert (found.starter, found.rank, found.world_size) == ("slurm", 5, 6)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 2)
    assert found.master_addr == "gpu03"
    assert found.master_port == 15000 + 4711 * 16 % 15000


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[1-3]", "gpu1"),
        ("a-1,b-2", "a-1"),
        ("n[007,9].site", "n007.site"),
        ("x[2],y", "x2"),
        ("r[1-2,4]n[03-04],z", "r1n03"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert _detect({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_a_batch_shell_of_slurm_is_one_process() -> None:
    assert _detect({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).starter == "single"


@pytest.mark.parametrize(
    "names",
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ],
)
def test_mpi(names: tuple[str, ...]) -> None:
    found = _detect(dict(zip(names, ("3", "4", "1", "2"))))
    assert (found.starter, found.rank, found.world_size, found.local_rank, found.local_world_size) == (
        "mpi",
        3,
        4,
        1,
        2,
    )
    assert found.master_addr is None  # two machines, and MPI does not say where rank 0 is
    assert _detect(dict(zip(names, ("1", "2", "1", "2")))).master_addr == "127.0.0.1"


def test_torchrun_overrides_slurm() -> None:
    assert _detect({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}).starter == "torchrun"


def test_an_empty_environment_is_one_process() -> None:
    assert _detect({}) == LaunchEnvironment(starter="single")


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        ({"RANK": "0"}, ["RANK=0 is set, but WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 is set, but RANK is not"]),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            ["rank=2 (from env RANK) is outside 0..1", "world_size=2 (from env WORLD_SIZE)"],
        ),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, ["RANK='zero' is not an integer"]),
        ({"RANK": "$SLURM_PROCID", "WORLD_SIZE": "2"}, ["RANK='$SLURM_PROCID'", "was not expanded by a shell"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3"}, ["rank=3 (from env LOCAL_RANK)"]),
        ({**SLURM, "SLURM_PROCID": "6"}, ["rank=6 (from env SLURM_PROCID)"]),
    ],
)
def test_contradictory_variables_are_rejected(variables: dict[str, str], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        _detect(variables)
    assert all(text in str(raised.value) for text in texts)
    assert raised.value.do
