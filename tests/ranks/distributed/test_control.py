"""rank_zero_only, agree, barrier and main_first on real ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from echelon.base.errors import DesyncError, RankTimeoutError
from echelon.distributed import agree, barrier, main_first, rank_zero_only
from tests.harness import RanksFailed, run_on_ranks


@rank_zero_only
def _own_rank() -> int:
    return dist.get_rank()


def test_rank_zero_only_runs_on_rank_zero() -> None:
    assert run_on_ranks(_own_rank, world_size=3) == [0, None, None]


def _votes() -> list[bool]:
    rank = dist.get_rank()
    return [agree(rank == 1), agree(False), agree(rank == 1, how="all"), agree(True, how="all")]


def test_agree_gives_every_rank_the_same_answer() -> None:
    assert run_on_ranks(_votes, world_size=3) == [[True, False, False, True]] * 3


def _barrier_order(folder: str) -> list[int]:
    """Return how many ranks had arrived before the barrier opened, for each of five rounds."""
    counts = []
    for turn in range(5):
        Path(folder, f"{turn}-{dist.get_rank()}").touch()
        barrier()
        counts.append(len(list(Path(folder).glob(f"{turn}-*"))))
    return counts


def test_a_barrier_repeatedly_waits_for_every_rank(tmp_path: Path) -> None:
    assert run_on_ranks(_barrier_order, str(tmp_path), world_size=3) == [[3] * 5] * 3


def _one_missing() -> str:
    barrier()
    if dist.get_rank() != 2:
        with pytest.raises(RankTimeoutError) as raised:
            barrier(timeout=timedelta(seconds=2))  # both arrive immediately, but the machine may be busy
        return str(raised.value)
    return "stayed away"


def test_a_barrier_names_the_missing_rank() -> None:
    texts = run_on_ranks(_one_missing, world_size=3)
    assert texts[2] == "stayed away"
    assert all("barrier: rank 2 did not arrive within 2 s" in text for text in texts[:2])


def _first_writes(folder: str) -> bool:
    path = Path(folder, "cache")
    with main_first():
        found = path.exists()
        path.touch()
    with main_first():  # a second block must wait again and not reuse the first result
        found_again = Path(folder, "second").exists()
        Path(folder, "second").touch()
    assert found == found_again
    return found


def test_main_first_lets_other_ranks_use_the_result_of_rank_zero(tmp_path: Path) -> None:
    assert run_on_ranks(_first_writes, str(tmp_path), world_size=3) == [False, True, True]


def _first_fails() -> None:
    with main_first():
        raise OSError("disk full")


def test_main_first_fails_on_all_ranks_if_the_first_rank_fails() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(_first_fails, world_size=2)
    assert isinstance(failed.value.errors[0], OSError)
    assert isinstance(failed.value.errors[1], DesyncError)
    assert "rank 0 failed: OSError: disk full" in str(failed.value.errors[1])


def _first_is_slow() -> bool:
    with main_first():
        if dist.get_rank() == 0:
            threading.Event().wait(3.0)  # beyond the group's timeout below
    return True


@pytest.mark.slow
def test_main_first_may_exceed_the_groups_timeout() -> None:
    assert run_on_ranks(_with_short_timeout, world_size=2, init_group=False) == [True, True]


def _with_short_timeout() -> bool:
    from echelon.distributed import process_group

    with process_group():
        barrier()  # late arrival at startup is not tested here
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        return _first_is_slow()


def test_without_a_process_group_one_rank_decides_alone() -> None:
    assert agree(True) is True
    assert agree(False) is False
    barrier()
    with main_first():
        ran = True
    assert ran
