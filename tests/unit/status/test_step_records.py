"""Step records: what a rank records is what a reader sees, however the rank ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from echelon.status import step_records
from echelon.status.step_records import StepRecorder, read_step_file

SPENT = tuple(range(10, 18))


def _recorder(path: Path, **limits: int) -> StepRecorder:
    return StepRecorder(path / "rank_3.steps", rank=3, world_size=4, **limits)


def _steps(path: Path) -> list[int]:
    return [record.step for record in read_step_file(path / "rank_3.steps").records]


def test_written_records_are_read(tmp_path: Path) -> None:
    before = time.time_ns()
    recorder = _recorder(tmp_path)
    recorder.add_loss(2.0)
    recorder.add_loss(4.0)
    recorder.num_samples, recorder.num_items, recorder.grad_norm, recorder.memory_mb = 64, 512.5, 0.25, 77.0
    recorder.record(1, 0.1, SPENT)
    recorder.record(2, 0.2, SPENT)
    file = read_step_file(tmp_path / "rank_3.steps")
    assert (file.rank, file.world_size) == (3, 4)
    assert before <= file.began_ns <= time.time_ns()
    first, second = file.records
    assert first[1:] == (1, 2, 3.0, 0.1, 0.25, 77.0, 64, 512.5, SPENT)
    assert 0 < first.time_ns < second.time_ns < 10**9
    # The sums go on; the loss and the norm belong to one step.
    assert (second.num_losses, second.num_samples, second.memory_mb) == (0, 64, 77.0)
    assert math.isnan(second.loss)
    assert math.isnan(second.grad_norm)


def test_the_last_records_can_be_read_alone(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    path = tmp_path / "rank_3.steps"
    assert read_step_file(path, num_last=3).last == []
    for step in range(1, 7):
        recorder.record(step, 0.1, SPENT)
    assert [record.step for record in read_step_file(path, num_records=0, num_last=2).last] == [5, 6]
    assert len(read_step_file(path, num_records=0, num_last=9).last) == 6


def test_a_loss_is_filled_in_later(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    place = recorder.record(1, 0.1, SPENT)
    recorder.record(2, 0.1, SPENT)
    recorder.fill_loss(place, 5.5, 2)
    recorder.fill_norm(place, 0.75)
    first, second = read_step_file(tmp_path / "rank_3.steps").records
    assert (first.loss, first.num_losses, first.lr, first.grad_norm) == (5.5, 2, 0.1, 0.75)
    assert (first.step, second.num_losses) == (1, 0)


def test_a_long_run_is_merged_and_keeps_its_sums_and_means(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, max_records=8)
    merged = []
    recorder.before_merge = lambda: merged.append(len(_steps(tmp_path)))
    for step in range(1, 41):
        recorder.add_loss(float(step), 1)
        recorder.num_samples += 32
        recorder.grad_norm = float(step % 7)
        recorder.record(step, step / 10, SPENT)
    records = read_step_file(tmp_path / "rank_3.steps").records
    assert merged == [8, 8, 8]
    # 40 steps in at most 8 records: each of the first covers 8 steps.
    assert [record.step for record in records] == [8, 16, 24, 32, 40]
    assert [record.num_losses for record in records] == [8] * 5
    assert [record.loss for record in records] == [4.5, 12.5, 20.5, 28.5, 36.5]
    assert [record.num_samples for record in records] == [256, 512, 768, 1024, 1280]
    assert [record.lr for record in records] == [0.8, 1.6, 2.4, 3.2, 4.0]
    assert records[1].grad_norm == 6.0  # the largest of the steps 9 to 16
    assert [path.name for path in tmp_path.iterdir()] == ["rank_3.steps"]


_ENDLESS = """
import sys
from echelon.status.step_records import StepRecorder
recorder = StepRecorder(sys.argv[1], rank=0, world_size=1, max_records=1024)
step = 0
while True:
    step += 1
    recorder.num_samples, recorder.num_items = step, step
    recorder.record(step, float(step), (step,) * 8)
    if step == 3000:
        print(flush=True)
"""


def test_kill_9_leaves_complete_records(tmp_path: Path) -> None:
    # Killed at random moments between the reservation, the records and the merges of its file.
    for i in range(3):
        path = tmp_path / f"rank_{i}.steps"
        child = subprocess.Popen([sys.executable, "-c", _ENDLESS, str(path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.003 * i)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        records = read_step_file(path).records
        assert len(records) >= 512
        for before, record in pairwise(records):
            assert record.step > before.step
            assert record.time_ns >= before.time_ns
            assert record.lr == record.num_samples == record.num_items == record.step
            assert record.spent_ns == (record.step,) * 8


def test_a_record_without_a_time_is_not_read(tmp_path: Path) -> None:
    # What a kill in the middle of a record leaves: the time, which is written last, is missing.
    recorder = _recorder(tmp_path)
    recorder.record(1, 0.1, SPENT)
    place = recorder.record(2, 0.1, SPENT)
    recorder.record(3, 0.1, SPENT)
    with (tmp_path / "rank_3.steps").open("r+b") as file:
        file.seek(place)
        file.write(bytes(8))
    assert _steps(tmp_path) == [1]


def test_a_full_disk_is_an_error_and_keeps_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _recorder(tmp_path)
    room = step_records.FIRST_RECORDS
    for step in range(room):
        recorder.record(step, 0.1, SPENT)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        recorder.record(room, 0.1, SPENT)
    assert _steps(tmp_path) == list(range(room))
    with pytest.raises(OSError, match="No space left"):
        StepRecorder(tmp_path / "other.steps", rank=0, world_size=1)
    assert not (tmp_path / "other.steps").exists()


def test_the_space_is_reserved(tmp_path: Path) -> None:
    # On a full disk, a write to a mapped file without blocks kills the process (SIGBUS).
    recorder = _recorder(tmp_path)
    facts = (tmp_path / "rank_3.steps").stat()
    assert facts.st_size == 65536
    assert facts.st_blocks * 512 >= facts.st_size
    recorder.record(1, 0.1, SPENT)
    recorder.close()
    assert (tmp_path / "rank_3.steps").stat().st_size == 4096 + 128
    assert _steps(tmp_path) == [1]


def test_a_forked_process_does_not_write(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    recorder.record(1, 0.1, SPENT)
    child = os.fork()
    if child == 0:
        recorder.record(100, 0.1, SPENT)
        recorder.record(101, 0.1, SPENT)
        recorder.close()
        os._exit(0)
    os.waitpid(child, 0)
    recorder.record(2, 0.1, SPENT)
    assert _steps(tmp_path) == [1, 2]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.steps"
    for data in (b"", b"ECHSTEPS", b"x" * 5000, b"ECHSTEPS" + bytes(5000)):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is not a file of step records"):
            read_step_file(path)


@pytest.mark.parametrize("num_records", [0, 1, 7, 64, 1000])
def test_a_sample_has_evenly_spaced_records_and_the_last(tmp_path: Path, num_records: int) -> None:
    recorder = _recorder(tmp_path)
    for step in range(1, num_records + 1):
        recorder.add_loss(step / 2)
        recorder.record(step, 0.1, SPENT)
    sample = read_step_file(tmp_path / "rank_3.steps", num_records=10, num_last=8)
    steps = _steps(tmp_path)
    assert (sample.rank, sample.world_size) == (3, 4)
    assert [record.step for record in sample.last] == steps[-8:]
    spread = steps if num_records <= 10 else [1 + i * (num_records - 1) // 9 for i in range(10)]
    assert [(record.step, record.loss) for record in sample.records] == [(step, step / 2) for step in spread]
