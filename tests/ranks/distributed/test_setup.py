"""setup, cleanup and process_group: from arguments, from the environment, and with invalid values."""

from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist

from echelon.base import environ
from echelon.base.errors import ConfigError, SetupError
from echelon.distributed import cleanup, gather_object, process_group, setup
from echelon.world.world import World
from tests.harness import RanksFailed, run_on_ranks

ALONE = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def test_one_process_needs_no_settings() -> None:
    with process_group() as world:
        assert (world.rank, world.world_size, world.local_rank) == (0, 1, 0)
        assert str(world.device) == "cpu" or world.device.index == 0
        assert dist.is_initialized()
    assert not dist.is_initialized()
    assert environ.get("GLOO_SOCKET_IFNAME") is None


def test_setup_twice_with_the_same_values_and_cleanup_twice_are_harmless() -> None:
    first = setup()
    assert setup(rank=0, world_size=1) == first
    cleanup()
    cleanup()
    assert not dist.is_initialized()


def test_a_failing_block_still_ends_the_group() -> None:
    with pytest.raises(KeyError), process_group():
        raise KeyError("x")
    assert not dist.is_initialized()


def test_an_existing_group_is_kept() -> None:
    setup()
    with process_group() as world:
        assert world.world_size == 1
    assert dist.is_initialized()
    cleanup()


def _by_environment() -> tuple[int, int, list[int]]:
    with process_group() as world:
        assert World.current() == world
        return world.rank, world.world_size, gather_object([world.rank])


def _by_arguments() -> tuple[int, int, list[int]]:
    rank, size = int(environ.get("RANK") or -1), int(environ.get("WORLD_SIZE") or -1)
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    # Only MASTER_ADDR and MASTER_PORT are in the environment, as tutorials set them.
    with environ.patch({**ALONE, "MASTER_ADDR": address, "MASTER_PORT": port}), process_group(rank, size) as world:
        assert (world.local_rank, world.local_world_size) == (rank, size)
        return world.rank, world.world_size, gather_object([world.rank])


def test_ranks_meet_by_environment_and_by_arguments() -> None:
    expected = [(rank, 3, [0, 1, 2]) for rank in range(3)]
    assert run_on_ranks(_by_environment, world_size=3, init_group=False) == expected
    assert run_on_ranks(_by_arguments, world_size=3, init_group=False) == expected


def _by_file(path: str) -> list[int]:
    with (
        environ.patch({"MASTER_ADDR": None, "MASTER_PORT": None}),
        process_group(init_method=f"file://{path}") as world,
    ):
        return gather_object([world.rank])


def test_ranks_meet_by_init_method(tmp_path: object) -> None:
    assert run_on_ranks(_by_file, f"{tmp_path}/store", world_size=2, init_group=False) == [[0, 1]] * 2


def _by_hand() -> tuple[int, int, int]:
    with environ.patch(ALONE):  # the harness created the group with torch, without echelon
        world = World.current()
        assert setup() == world
        return world.rank, world.world_size, world.local_rank


def test_a_group_created_by_the_user_is_used() -> None:
    assert run_on_ranks(_by_hand, world_size=2) == [(0, 2, 0), (1, 2, 1)]


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"rank": 2, "world_size": 2}, ["rank=2", "outside 0..1", "setup(rank=)"]),
        ({"rank": -1, "world_size": 2}, ["rank=-1", "outside 0..1"]),
        ({"rank": 0, "world_size": 0}, ["world_size=0", "below 1"]),
        ({"rank": 1}, ["needs both rank and world_size"]),
        ({"world_size": 2}, ["needs both rank and world_size"]),
    ],
)
def test_a_rank_outside_the_world_is_rejected(arguments: dict[str, int], texts: list[str]) -> None:
    with environ.patch(ALONE), pytest.raises(ConfigError) as raised:
        setup(**arguments)
    assert all(text in str(raised.value) for text in texts)
    assert raised.value.do


@pytest.mark.parametrize(("name", "value", "found"), [("rank", 1, 0), ("world_size", 4, 2)])
def test_arguments_that_contradict_the_environment_are_rejected_with_both_origins(
    name: str, value: int, found: int
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with environ.patch({**ALONE, **variables}), pytest.raises(ConfigError) as raised:
        setup(**{name: value})
    assert f"setup({name}={value}) contradicts {name}={found} from the environment" in str(raised.value)
    assert f"env {name.upper()}" in str(raised.value)


def test_setup_again_with_other_values_is_refused() -> None:
    with (
        process_group(),
        pytest.raises(SetupError, match=r"already exists with different values \(world_size 1 -> 2\)"),
    ):
        setup(rank=0, world_size=2)


def test_the_error_for_a_missing_address_names_the_variable() -> None:
    with environ.patch(ALONE), pytest.raises(SetupError, match="MASTER_ADDR is not set"):
        setup(rank=0, world_size=2)


def test_the_error_for_a_used_port_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with environ.patch({**ALONE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}):
            with pytest.raises(SetupError, match=f"port {port} on 127.0.0.1 is in use") as raised:
                setup(rank=0, world_size=2)
    assert "choose another MASTER_PORT" in str(raised.value)
    assert environ.get("GLOO_SOCKET_IFNAME") is None


def _late(rank_that_stays_away: int) -> None:
    if dist.is_initialized() or int(environ.get("RANK") or 0) == rank_that_stays_away:
        return
    setup(timeout=1.0)


def test_a_missing_rank_is_a_setup_error() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_late, 1, world_size=2, init_group=False)
    assert isinstance(failed.value.errors[0], SetupError)
    assert "cannot create a process group of 2 processes" in str(failed.value.errors[0])


def _again_and_again() -> list[list[int]]:
    seen = []
    for turn in range(4):
        if int(environ.get("RANK") or 0) == turn % 3:
            threading.Event().wait(0.3)  # late: other ranks must not use its address in the previous group
        with process_group(timeout=20.0) as world:
            seen.append(gather_object([world.rank * 10 + turn]))
    return seen


def test_a_new_group_ignores_addresses_of_the_old_one() -> None:
    expected = [[turn, 10 + turn, 20 + turn] for turn in range(4)]
    assert run_on_ranks(_again_and_again, world_size=3, init_group=False) == [expected] * 3
