"""Which rank began: the class of an end before its time (pure functions, no processes)."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from echelon.diagnose.collectives import CollectiveCall, History
from echelon.diagnose.stall import Answer, Ending
from echelon.launch.failures.failure import (
    Cause,
    ErrorRecord,
    Frame,
    RankEnd,
    cause_of,
    exit_status,
    explain,
    first_failure,
    is_settled,
)
from echelon.status.board import Doing, Phase, StatusNote, Watch
from echelon.status.call_site import CallSite

RESET = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:41: Connection reset by peer"
CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4015"
MS = 1_000_000


def error(ms: int, message: str = "bad", kind: str = "ValueError", **more: object) -> ErrorRecord:
    return ErrorRecord(time_ns=ms * MS, type=kind, message=message, **more)  # type: ignore[arg-type]


def end(rank: int, code: int | None, ms: int | None = None, record: ErrorRecord | None = None) -> RankEnd:
    return RankEnd(rank=rank, exit_code=code, ended_ns=None if ms is None else ms * MS, record=record)


def lost(rank: int, ms: int, message: str = RESET) -> RankEnd:
    return end(rank, 1, ms + 400, error(ms, message, "RuntimeError"))


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (end(1, -signal.SIGKILL, 107), Cause.OWN),
        (end(1, -signal.SIGSEGV, 107), Cause.OWN),
        (end(1, 1, 700, error(107)), Cause.OWN),
        (end(1, None, None, error(107)), Cause.OWN),  # still in Python's finalisation
        (end(1, 1, 731, error(107, "no data", "SystemExit")), Cause.OWN),
        (end(1, 3, 107), Cause.OWN),
        (end(1, 0, 107), Cause.LEFT_EARLY),
        (end(1, 1, 700, error(107, "Connection reset by peer", "ConnectionResetError")), Cause.OWN),  # its own download
    ],
)
def test_victims_stamped_earlier_do_not_hide_the_culprit(culprit: RankEnd, cause: Cause) -> None:
    ends = [lost(0, 100), culprit, lost(2, 101, CLOSED), end(3, None)]
    assert first_failure(ends) == culprit
    assert cause_of(culprit, ends) is cause
    assert cause_of(ends[0], ends) is Cause.COMMUNICATION
    assert cause_of(ends[3], ends) is Cause.NONE


def test_inside_a_class_the_earlier_one_began() -> None:
    ends = [end(0, 1, 900, error(500)), end(1, 1, 800, error(499)), end(2, -6, 700)]
    assert first_failure(ends) == ends[1]
    assert first_failure([lost(0, 7), lost(1, 5), lost(2, 6)]) == lost(1, 5)


def test_error_that_wraps_a_lost_connection_is_a_victims() -> None:
    wrapped = end(0, 1, 600, error(100, "step failed", "MyError", chain=(f"RuntimeError: {CLOSED}",)))
    ends = [wrapped, end(1, -9, 107)]
    assert first_failure(ends) == ends[1]


def test_gloo_timeout_and_nccl_errors_are_communication() -> None:
    messages = [
        "Timed out waiting 5000ms for recv operation to complete",
        "NCCL error: ncclRemoteError: remote process exited",
    ]
    for message in messages:
        ends = [end(0, 1, 9, error(1, message, "torch.distributed.DistBackendError")), end(1, 1, 99, error(90))]
        assert first_failure(ends) == ends[1]


def test_only_good_ends_are_no_failure() -> None:
    ends = [end(0, 0, 5), end(1, 0, 6), end(2, None)]
    assert first_failure(ends) is None
    assert exit_status(ends) == 0


def test_error_in_a_thread_of_a_running_rank_is_no_failure() -> None:
    assert first_failure([end(0, None, None, error(3, thread="loader"))]) is None


def test_waiting_goes_on_only_while_it_could_change_the_verdict() -> None:
    running = end(2, None)
    assert not is_settled([lost(0, 100), running])
    assert not is_settled([lost(0, 100), end(1, 0, 90), running])
    assert not is_settled([lost(0, 100), end(1, None, None, error(99)), running])  # its exit code is to come
    assert is_settled([lost(0, 100), end(1, -9, 107), running])
    assert is_settled([lost(0, 100), lost(1, 101)])


@pytest.mark.parametrize(("code", "status"), [(1, 1), (7, 7), (255, 255), (-9, 137), (-15, 143)])
def test_exit_status_is_the_first_ranks_own(code: int, status: int) -> None:
    assert exit_status([lost(0, 100), end(1, code, 200)]) == status


def test_exit_status_is_never_zero_after_a_failure() -> None:
    assert exit_status([lost(0, 100), end(1, 0, 200)]) == 1
    assert exit_status([end(0, None, None, error(3)), end(1, None)]) == 1


def test_report_of_a_thousand_ranks_stays_short() -> None:
    frames = tuple(Frame(file=f"/home/me/f{i}.py", line=i, function="f", source="x = 1") for i in range(50))
    installed = Frame(file="/x/site-packages/torch/nn.py", line=1, function="forward", user=False)
    culprit = end(7, 1, 700, error(107, "\n".join(["long"] * 100), frames=(*frames, installed)))
    ends = [culprit if r == 7 else lost(r, 100) if r % 2 else end(r, None) for r in range(1000)]
    what, where, do = explain(ends, logs="logs/")
    assert len(f"{what}\n{where}\n{do}".splitlines()) <= 30
    assert max(len(line) for line in what.splitlines()) < 450
    assert "rank 7 of 1000" in where
    assert "/home/me/f49.py:49 in f: x = 1" in where
    assert "site-packages" not in where
    assert "(94 more lines)" in what


def test_report_names_how_the_others_ended() -> None:
    what, _, _ = explain([lost(0, 100), end(1, -9, 107), lost(2, 101), end(3, None), end(4, 0, 5)], logs="logs/")
    assert "others: ranks 0, 2 then lost contact; rank 3 stopped by echelon; rank 4 ended normally" in what


def test_another_error_is_shown_with_its_message_its_line_and_its_remedy() -> None:
    def frame(line: int) -> tuple[Frame, ...]:
        return (Frame(file="/home/me/train.py", line=line, function="fail", source=f"raise {line}"),)

    missing = "Torch not compiled with CUDA enabled"
    ends = [
        end(0, 1, 900, error(100, "bad sample 17", frames=frame(7))),
        end(1, 1, 900, error(300, "'labels'\nsecond line", "KeyError", frames=frame(9))),
        end(2, None),
        end(3, 1, 900, error(400, missing, "AssertionError", frames=frame(11))),
        end(4, 1, 900, error(310, "'labels'\nsecond line", "KeyError", frames=frame(9))),
        end(5, 1, 900, error(101, "bad sample 18", frames=frame(7))),
    ]
    what, where, do = explain(ends, logs="logs/")
    assert what.splitlines() == [
        "rank 0 failed first: ValueError: bad sample 17",
        "  others: ranks 1, 4 failed 0.2 s later with KeyError: 'labels'; rank 2 stopped by echelon; "
        f"rank 3 failed 0.3 s later with AssertionError: {missing}; rank 5 failed with the same error",
    ]
    assert where.splitlines() == [
        "rank 0 of 6",
        "         /home/me/train.py:7 in fail: raise 7",
        "         ranks 1, 4",
        "         /home/me/train.py:9 in fail: raise 9",
        "         rank 3",
        "         /home/me/train.py:11 in fail: raise 11",
    ]
    assert do is not None
    other, logs = do.splitlines()
    assert other.startswith("rank 3: replace x.cuda()")
    assert logs == "  logs:  logs/"


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            "aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all",
            ["call the model that prepare()"],
        ),
        (".tolist() is not supported for tensor subclasses, got DTensor", ["full_tensor()"]),
        ("setStorage: sizes [4, 4], ... are out of bounds for storage of size 0", ["create_graph=True"]),
        ("Expected to have finished reduction in the prior iteration before starting a", ["find_unused_parameters"]),
        ("Torch not compiled with CUDA enabled", ["accelerator.device"]),
        ("'AcceleratedOptimizer' object is not callable", ["in the order of its arguments"]),
        ("mat1 and mat2 must have the same dtype, but got Long and Float", ["x.float()"]),
        ("mat1 and mat2 shapes cannot be multiplied (4x4 and 5x8)", ["in_features"]),
        ("num_samples should be a positive integer value, but got num_samples=0", ["the dataset is empty"]),
        ("No CUDA GPUs are available", ["accelerator.device"]),
        # As an H200 gave them with torch 2.11; the last two are those of torch's documentation.
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
            ["gradient_accumulation_steps", "engine='fsdp2'", "expandable_segments"],
        ),
        ("CUDA error: device-side assert triggered\nSearch for `x'", ["CUDA_LAUNCH_BLOCKING=1", "out of range"]),
        ("CUDA error: an illegal memory access was encountered", ["CUDA_LAUNCH_BLOCKING=1", "compute-sanitizer"]),
        ("CUDA error: misaligned address", ["CUDA_LAUNCH_BLOCKING=1"]),
    ],
)
def test_what_torch_does_not_say_is_said(message: str, advice: list[str]) -> None:
    what, _, do = explain([end(0, 1, 200, error(100, message, "RuntimeError"))], logs="logs/")
    assert message.splitlines()[0] in what
    assert do is not None
    assert all(part in do for part in advice), do


def test_an_error_of_the_users_own_code_is_shown_with_its_line_and_where_the_output_is_without_advice() -> None:
    frame = Frame(file="/home/me/train.py", line=7, function="load", source="images[3]")
    what, where, do = explain(
        [end(0, 1, 200, error(100, "list index out of range", "IndexError", frames=(frame,)))], logs="/l"
    )
    assert what == "rank 0 failed first: IndexError: list index out of range"
    assert where == "rank 0 of 1\n         /home/me/train.py:7 in load: images[3]\n  logs:  /l"
    assert do is None


def frame(line: int, source: str) -> tuple[Frame, ...]:
    return (Frame(file="/home/me/train.py", line=line, function="train", source=source),)


def test_a_rank_that_lost_contact_is_shown_with_the_line_and_step_at_which_it_waited() -> None:
    note = StatusNote(0, 12, 3, 9, Phase.TRAIN, False, "", "", "", "train.py")
    waiting = [
        replace(lost(rank, 100), record=error(100, RESET, "RuntimeError", frames=frame(9, "dist.barrier()")), note=note)
        for rank in (0, 2)
    ]
    what, _, _ = explain([waiting[0], end(1, -9, 107), waiting[1]], logs="logs/")
    assert what.splitlines()[1] == (
        "  others: ranks 0, 2 then lost contact, waiting at /home/me/train.py:9 in train: dist.barrier(), step 12, training"
    )


def test_a_rank_that_left_early_is_shown_with_its_last_line_and_the_line_that_waits() -> None:
    waiting = replace(lost(0, 100), record=error(100, CLOSED, "RuntimeError", frames=frame(9, "dist.barrier()")))
    site = CallSite(file="/home/me/train.py", line=4, source="sys.exit()")
    left = replace(end(1, 0, 90), last_words=Answer(call_site=site, ending=Ending.EXIT))
    what, where, do = explain([waiting, left], logs="logs/")
    assert what.splitlines() == [
        "rank 1 failed first: it exited (code 0) while other ranks were still waiting for it",
        "  others: rank 0 then lost contact, waiting at /home/me/train.py:9 in train: dist.barrier()",
    ]
    assert where.splitlines() == ["rank 1 of 2", "         sys.exit() at /home/me/train.py:4: sys.exit()"]
    assert do is not None
    assert "look for an early return, break, sys.exit() or caught exception on the rank that exited" in do
    # Without Python's exit: the line of the last heartbeat.
    watch = Watch(0, 1, 1, 2, Doing.NOTHING, 0, 17, "/home/me/train.py")
    _, where, _ = explain([waiting, replace(end(1, 0, 90), watch=watch)], logs="logs/")
    assert where.splitlines()[1] == ("         without Python's exit (os._exit); last seen at /home/me/train.py:17")


def test_a_rank_that_left_after_a_call_of_another_size_is_no_early_exit() -> None:
    def words(size: int, *, ending: Ending = Ending.NONE) -> Answer:
        place = "train.py:8: dist.all_reduce(x)"
        call = CollectiveCall(
            number=1, kind="all_reduce", sizes=((size,),), dtypes=("Float",), is_over=True, place=place
        )
        return Answer(histories={"0": History(ranks=(0, 1), started=(call,))}, ending=ending)

    left, victim = (
        replace(end(0, 0, 90), last_words=words(2, ending=Ending.END)),
        replace(lost(1, 100), last_words=words(3)),
    )
    what, _, _ = explain([left, victim], logs="logs/")
    assert what.splitlines()[1:3] == [
        "    rank 0: called all_reduce number 1 of float[2]; at train.py:8: dist.all_reduce(x); exited later (code 0)",
        "    rank 1: called all_reduce number 1 of float[3]; at train.py:8: dist.all_reduce(x)",
    ]
    same = replace(victim, last_words=words(2))
    assert "exited (code 0) while other ranks were still waiting" in explain([left, same], logs="logs/")[0]


DEVICE = "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided (default))"


def refused(rank: int, kind: str, size: str, line: int) -> RankEnd:
    """As torch 2.13 raises it with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    own = f"CollectiveFingerPrint(SequenceNumber=1, OpType={kind}, TensorShape=[{size}], TensorDtypes=Float, {DEVICE})"
    other = "CollectiveFingerPrint(SequenceNumber=0OpType=GATHER)"
    text = (
        f"Detected mismatch between collectives on ranks. Rank {rank} is running collective: {own}, but Rank 0 is running "
        f"collective: {other}.Collectives differ in the following aspects:   Op type: {kind}vs GATHER"
    )
    return replace(end(rank, 1, 400), record=error(100 + rank, text, "RuntimeError", frames=frame(line, "f(x)")))


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        ("ALLREDUCE", "all_reduce", "9"),
        ("GATHER", "gather", "4, 2"),
        ("_ALLGATHER_BASE", "all_gather_into_tensor", "4"),
    ],
)
def test_what_torch_refuses_to_run_is_told_with_every_ranks_own_call(kind: str, name: str, size: str) -> None:
    ends = [refused(0, "GATHER", "4", 7), refused(1, kind, size, 8), refused(2, "GATHER", "4", 7)]
    what, _, _ = explain(ends, logs="logs/")
    assert what.splitlines()[1:] == [
        f"    rank 1: in {name} number 2 of float[{size}]; at /home/me/train.py:8: f(x)",
        "    ranks 0, 2: in gather number 2 of float[4]; at /home/me/train.py:7: f(x)",
    ]
    assert not is_settled([ends[0], end(1, None), ends[2]])  # it is about to raise its own
