"""``run_on_ranks`` itself: results, failures, hangs and deaths of ranks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests import harness
from tests.harness import MAX_THREADS, RankDied, RanksFailed, RanksHung, import_ahead, run_on_ranks

torch.rand(())  # a draw while this file is imported, which several test files make


class _Unpicklable(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("no pickles of this")


def _rank_and_sum(offset: int, *, factor: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total) * factor


def _world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _pid() -> int:
    return os.getpid()


def _fail_on(ranks: tuple[int, ...]) -> None:
    if dist.get_rank() in ranks:
        raise ValueError(f"planted on {dist.get_rank()}")
    dist.barrier()


def _raise_unpicklable() -> None:
    raise _Unpicklable("planted")


def _wait_forever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        _never_comes_back()


def _never_comes_back() -> None:
    threading.Event().wait()


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(17)
    dist.barrier()


def _kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _system_exit() -> None:
    raise SystemExit(0)


def _warn() -> None:
    warnings.warn("planted", UserWarning, stacklevel=1)


def _environment(*names: str) -> list[str | None]:
    found = [os.environ.get(name) for name in names]
    os.environ["LEFT_BEHIND"] = "1"
    return found


def _through_env() -> int:
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def _group_left_behind() -> None:
    dist.init_process_group("gloo")


def _has_group() -> bool:
    return dist.is_initialized()


def _speak() -> None:
    print("hello from", dist.get_rank())


def _tensor() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()))


def _random() -> float:
    return float(torch.rand(()))


def test_results_come_in_rank_order() -> None:
    assert run_on_ranks(_rank_and_sum, 10, factor=2) == [(0, 42), (1, 42)]


def test_the_world_grows_and_shrinks_between_calls() -> None:
    assert run_on_ranks(_world, world_size=3) == [(0, 3), (1, 3), (2, 3)]
    assert run_on_ranks(_world, world_size=1) == [(0, 1)]
    assert run_on_ranks(_world, world_size=2) == [(0, 2), (1, 2)]


def test_a_second_call_reuses_the_processes() -> None:
    assert run_on_ranks(_pid) == run_on_ranks(_pid)


def _has_imported(name: str) -> bool:
    return name in sys.modules


def test_preloaded_modules_are_available_when_a_rank_starts() -> None:
    assert run_on_ranks(_has_imported, "mailbox") == [False, False]
    import_ahead("mailbox")
    before = run_on_ranks(_pid)
    assert run_on_ranks(_has_imported, "mailbox") == [True, True]
    import_ahead("mailbox")
    assert run_on_ranks(_pid) == before


def test_tensors_are_returned() -> None:
    first, second = run_on_ranks(_tensor)
    assert first.tolist() == [0.0, 0.0, 0.0]
    assert second.tolist() == [1.0, 1.0, 1.0]


def test_each_call_starts_from_the_same_seed() -> None:
    assert len({*run_on_ranks(_random), *run_on_ranks(_random)}) == 1


def test_a_replaced_rank_has_the_seed_of_the_others_although_it_imports_the_file_anew() -> None:
    with pytest.raises(RanksFailed):
        run_on_ranks(_kill_on, 1, timeout=30)
    assert len(set(run_on_ranks(_random))) == 1


def test_the_error_shows_the_failing_rank_and_its_traceback() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_fail_on, (1,), timeout=30)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed\n")
    assert "in _fail_on" in text
    assert "ValueError: planted on 1" in text
    assert "rank_worker" not in text  # without frames of the harness
    assert "still running when the others were stopped: rank 0" in text
    assert isinstance(caught.value.errors[1], ValueError)
    assert str(caught.value.errors[1]) == "planted on 1"


def test_the_error_shows_every_failed_rank() -> None:
    with pytest.raises(RanksFailed, match="ranks 0, 1 of 2 failed") as caught:
        run_on_ranks(_fail_on, (0, 1))
    assert [str(caught.value.errors[rank]) for rank in (0, 1)] == ["planted on 0", "planted on 1"]


def _fail_after(seconds: tuple[float, ...]) -> None:
    """Poll, like code that waits for a file, and fail."""
    end = time.monotonic() + seconds[dist.get_rank()]
    while time.monotonic() < end:
        time.sleep(0.005)
    raise ValueError(f"planted on {dist.get_rank()}")


def test_a_working_rank_is_awaited_when_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 0.2)  # like a machine on which rank 0 runs a tenth of the time
    with pytest.raises(RanksFailed, match="ranks 0, 1 of 2 failed"):
        run_on_ranks(_fail_after, (1.0, 0.0))


def _answer_after(seconds: tuple[float, ...]) -> None:
    end = time.monotonic() + seconds[dist.get_rank()]
    while time.monotonic() < end:
        time.sleep(0.005)
    if seconds[dist.get_rank()] == 0.0:
        _never_comes_back()


def test_a_working_rank_at_the_timeout_is_not_reported_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 0.2)
    with pytest.raises(RanksHung) as caught:
        run_on_ranks(_answer_after, (0.8, 0.0), timeout=0.3)
    assert caught.value.silent == [1]


def test_ranks_that_all_returned_are_not_restarted() -> None:
    before = run_on_ranks(_pid)
    with pytest.raises(RanksFailed):
        run_on_ranks(_fail_on, (0, 1))
    assert run_on_ranks(_pid) == before


def test_an_unpicklable_exception_keeps_its_message() -> None:
    with pytest.raises(RanksFailed, match="_Unpicklable: planted") as caught:
        run_on_ranks(_raise_unpicklable, world_size=1)
    assert caught.value.errors == {}


def test_an_unpicklable_result_is_a_failure_of_that_rank() -> None:
    with pytest.raises(RanksFailed, match="rank 0 of 1 failed") as caught:
        run_on_ranks(threading.Lock, world_size=1)
    assert isinstance(caught.value.errors[0], TypeError)


def test_a_hang_names_the_silent_rank_and_shows_its_stack() -> None:
    with pytest.raises(RanksHung) as caught:
        run_on_ranks(_wait_forever_on, 1, timeout=2)
    assert caught.value.silent == [1]
    assert str(caught.value).startswith("rank 1 of 2 did not answer within 2 s")
    assert "_never_comes_back" in str(caught.value)


class _Hangs(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        _never_comes_back()


def _wait_for_a_loader_worker() -> None:
    next(iter(DataLoader(_Hangs(), num_workers=1)))


def test_a_hang_shows_the_stack_of_the_loader_worker_that_a_rank_waits_for() -> None:
    with pytest.raises(RanksHung) as caught:
        run_on_ranks(_wait_for_a_loader_worker, world_size=1, timeout=2)
    rank, _, worker = str(caught.value).partition("its process")
    assert "_wait_for_a_loader_worker" in rank
    assert "_never_comes_back" not in rank
    assert "__getitem__" in worker
    assert "_never_comes_back" in worker


def test_a_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="rank 1: died with exit code 17") as caught:
        run_on_ranks(_exit_on, 1)
    assert isinstance(caught.value.errors[1], RankDied)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RanksFailed, match="rank 0: died of signal SIGKILL"):
        run_on_ranks(_kill_on, 0)


def test_the_next_call_works_after_a_death() -> None:
    with pytest.raises(RanksFailed):
        run_on_ranks(_exit_on, 0)
    assert run_on_ranks(_world) == [(0, 2), (1, 2)]


def test_a_process_keeps_its_rank_when_another_dies() -> None:
    before = run_on_ranks(_pid)
    with pytest.raises(RanksFailed):
        run_on_ranks(_exit_on, 0)
    after = run_on_ranks(_pid)
    assert after[0] != before[0]
    assert after[1] == before[1]


def _begin_threads(count: int) -> int:
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_a_process_with_too_many_threads_is_replaced() -> None:
    kept = run_on_ranks(_begin_threads, 1)
    full = run_on_ranks(_begin_threads, MAX_THREADS)
    assert kept == full
    assert not set(run_on_ranks(_pid)) & set(full)


def _cannot_join() -> None:
    if os.environ["RANK"] == "1":
        limit = timedelta(seconds=0.2)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=2, timeout=limit)


def test_a_rank_that_failed_to_join_a_group_joins_the_next_one() -> None:
    # Like a rank whose peer died inside init_process_group.
    before = run_on_ranks(_pid)
    with pytest.raises(RanksFailed, match="rank 1 of 2 failed"):
        run_on_ranks(_cannot_join, init_group=False)
    assert run_on_ranks(_world, timeout=10) == [(0, 2), (1, 2)]
    assert run_on_ranks(_pid) == before


def test_a_system_exit_is_a_failure_and_does_not_end_the_worker() -> None:
    before = run_on_ranks(_pid)
    with pytest.raises(RanksFailed, match="SystemExit"):
        run_on_ranks(_system_exit)
    assert run_on_ranks(_pid) == before


def test_a_warning_on_a_rank_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="UserWarning: planted"):
        run_on_ranks(_warn, world_size=1)


def test_ranks_have_rank_variables_and_the_tests_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SET_BY_THE_TEST", "LEFT_BEHIND")
    assert run_on_ranks(_environment, *names) == [["0", "2", "0", "2", "yes", None], ["1", "2", "1", "2", "yes", None]]
    monkeypatch.delenv("SET_BY_THE_TEST")
    assert run_on_ranks(_environment, "SET_BY_THE_TEST", "LEFT_BEHIND") == [[None, None], [None, None]]


def _logs_more() -> tuple[int, int]:
    logger = logging.getLogger("echelon")
    found = logger.getEffectiveLevel(), len(logger.handlers)
    logger.setLevel(logging.DEBUG)
    logging.getLogger().setLevel(logging.DEBUG)
    logger.addHandler(logging.NullHandler())
    return found


def test_log_levels_and_handlers_are_restored_after_a_call() -> None:
    first = run_on_ranks(_logs_more)
    assert run_on_ranks(_logs_more) == first


def test_without_a_group_the_environment_supports_env_init() -> None:
    assert run_on_ranks(_has_group, init_group=False) == [False, False]
    assert run_on_ranks(_through_env, init_group=False) == [3, 3]
    assert run_on_ranks(_through_env, init_group=False) == [3, 3]


def test_a_leaked_process_group_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="_group_left_behind left its process group behind"):
        run_on_ranks(_group_left_behind, init_group=False)
    assert run_on_ranks(_has_group, init_group=False) == [False, False]


def test_the_output_of_ranks_is_forwarded(capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(_speak)
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def test_a_function_that_cannot_be_pickled_is_rejected_immediately() -> None:
    with pytest.raises((AttributeError, TypeError, ValueError), match=r"pickle|local|import"):
        run_on_ranks(lambda: None)
