"""Promises of saving beside the format: which files are kept, locks, full disks, and background saves."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echelon.base.errors import CheckpointError, UsageError
from echelon.checkpoint import lock as lock_module, storage
from echelon.checkpoint.background_save import BackgroundSaver
from echelon.checkpoint.lock import Owner, RunLock, is_over
from echelon.checkpoint.read import Checkpoint, try_open
from echelon.checkpoint.regions import ChunkBounds
from echelon.checkpoint.rotation import numbered, remove_oldest, surplus
from echelon.checkpoint.save import Content, begin_save, save
from tests.checkpoint_ranks import on_threads, save_on_threads, world_of_threads
from tests.toy_storage import ToyStorage

WORLD = world_of_threads(0, 1)


def _fill_disk(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
    """Leave so much room on the disk."""
    left, real = [room_bytes], storage.write

    def write(handle: int, data: bytes | memoryview) -> None:
        fits = min(len(data), left[0])
        real(handle, memoryview(data)[:fits])
        left[0] -= fits
        if fits < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "write", write)
    monkeypatch.setattr(storage, "free_bytes", lambda folder: left[0])


# ---- what is written -------------------------------------------------------------------------------------------------


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(5, 7),
        "t": torch.randn(4, 3).t(),
        "half": torch.randn(3).bfloat16(),
        "flag": torch.tensor([True, False]),
        "zero": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
        "eight": torch.randn(8).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, dtype=torch.complex64).conj(),
    }
    folder = save(tmp_path / "c", Content(tensors=tensors), world=WORLD)
    read = load_file(folder / "rank_00000.safetensors")
    assert read.keys() == tensors.keys() - {"none"}
    for name in read.keys() - {"complex", "eight"}:
        assert torch.equal(read[name], tensors[name]), name
    assert torch.equal(read["complex"].view(torch.complex64).squeeze(-1), tensors["complex"])
    checkpoint = Checkpoint(folder)
    assert checkpoint.problems() == []
    for name, tensor in tensors.items():
        found = checkpoint.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            found.view(torch.uint8) if name == "eight" else found,
            tensor.view(torch.uint8) if name == "eight" else tensor,
        )


def test_tied_tensors_are_written_once_and_readable_by_both_names(tmp_path: Path) -> None:
    w = torch.randn(3)
    folder = save(tmp_path / "c", Content(tensors={"a": w, "b": w, "part": w[:2]}), world=WORLD)
    assert json.loads((folder / "manifest.json").read_text())["manifest"]["aliases"] == {"b": "a"}
    checkpoint = Checkpoint(folder)
    assert checkpoint.names() == ["a", "b", "part"]
    assert torch.equal(checkpoint.read("b"), w)
    assert torch.equal(checkpoint.read("part"), w[:2])


def test_reading_a_part_does_not_read_the_rest(tmp_path: Path) -> None:
    w = torch.randn(1000, 500)
    folder = save(tmp_path / "c", Content(tensors={"w": w}), world=WORLD)
    checkpoint = Checkpoint(folder)
    checkpoint.read("w", ChunkBounds((0, 0), (1, 1)))
    tracemalloc.start()
    rows = checkpoint.read("w", ChunkBounds((10, 0), (20, 500)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(rows, w[10:30])
    assert peak < 20 * 500 * 4 + 20_000  # the rows once, beside the tensor itself; the whole has 2 MB
    assert torch.equal(checkpoint.read("w", ChunkBounds((3, 7), (4, 5))), w[3:7, 7:12])


def test_missing_tensors_and_other_shapes_are_errors_before_copying(tmp_path: Path) -> None:
    checkpoint = Checkpoint(
        save(tmp_path / "c", Content(tensors={"a": torch.ones(2), "b": torch.ones(3)}), world=WORLD)
    )
    a = torch.zeros(2)
    with pytest.raises(CheckpointError, match="does not contain c\n"):
        checkpoint.read_into({"a": a, "c": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"b has shape \[3\] in .*, but \[4\] in this run"):
        checkpoint.read_into({"a": a, "b": torch.zeros(4)})
    assert torch.equal(a, torch.zeros(2))


def test_files_of_other_programs_in_a_checkpoint_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "c"
    save_on_threads(target, 1)
    (target / "notes").mkdir()
    (target / "notes" / "n.txt").write_text("mine")
    (target / "rank_00007.json").write_text("a part of a save of more ranks")
    save_on_threads(target, 2, world_size=1)
    assert sorted(path.name for path in target.iterdir()) == [
        "manifest.json",
        "notes",
        "objects.json",
        "rank_00000.json",
        "rank_00000.safetensors",
    ]
    assert (target / "notes" / "n.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@pytest.mark.parametrize("config", [None, {"tensors": {"files": ["of_others"]}}])
def test_files_of_hooks_are_replaced_with_their_checkpoint(config: Any, tmp_path: Path) -> None:
    content = Content(tensors={"w": torch.ones(1)}, config=config)
    write = lambda folder, is_owner: (folder / "extra").write_text("of a hook")  # noqa: E731
    folder = save(tmp_path / "c", content, world=WORLD, write=write)
    assert Checkpoint(folder).manifest.files["extra"].size == 9
    (folder / "of_others").write_text("mine")
    save(tmp_path / "c", content, world=WORLD)
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "objects.json",
        "of_others",
        "rank_00000.safetensors",
    }


def test_unsupported_content_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    save_on_threads(tmp_path / "c", 1, world_size=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"ema\['f'\] is a builtins.object"):
        save(tmp_path / "c", Content(objects={"ema": {"f": object()}}), world=WORLD)
    with pytest.raises(CheckpointError, match="is on the meta device, so it has no values to save"):
        save(tmp_path / "c", Content(tensors={"w": torch.empty(1, device="meta")}), world=WORLD)
    with pytest.raises(CheckpointError, match=r"the tensor names for .* are not unique or are reserved"):
        save(tmp_path / "c", Content(tensors={"__metadata__": torch.ones(1)}), world=WORLD)
    with pytest.raises(UsageError, match="file exists and is a file, not a directory"):
        save(tmp_path / "file", Content(), world=WORLD)
    with pytest.raises(UsageError, match="is a mount point and cannot be replaced"):
        save(Path("/"), Content(), world=WORLD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "file"]
    assert Checkpoint(tmp_path / "c").objects() == {"step": 1}


# ---- ranks that do not agree, or do not see each other's files -------------------------------------------------------


def test_a_rank_that_cannot_save_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def run(world: Any, gather: Any) -> str:
        content = Content(rank_objects={"mine": object() if world.rank == 1 else 1})
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path / "c", content, world=world, gather=gather)
        return str(caught.value)

    other, own = on_threads(run, 2)
    assert "rank 1 mine is a builtins.object" in own
    assert "failed on other ranks\n    rank 1: rank 1 mine is a builtins.object" in other
    assert list(tmp_path.iterdir()) == []


def test_machines_without_a_shared_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.checkpoint.commit._VISIBLE_WITHIN_S", 0.0)
    real = storage.kind

    def kind(path: Path) -> Any:  # rank 1 does not see the files of the other machine
        is_hidden = ".tmp-" in path.name and threading.current_thread().name == "rank 1"
        return None if is_hidden else real(path)

    monkeypatch.setattr(storage, "kind", kind)

    def run(world: Any, gather: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path / "c", Content(), world=world, gather=gather)
        return str(caught.value)

    for text in on_threads(run, 2):
        assert "is not shared by all ranks: rank 0 on " in text
        assert "these ranks cannot see it: rank 1 on " in text
        assert "save_on_each_node=True" in text
    assert list(tmp_path.iterdir()) == []


def test_each_machine_may_write_a_separate_checkpoint(tmp_path: Path) -> None:
    def place(world: Any) -> Any:
        return replace(world, node_rank=world.rank, local_rank=0, local_world_size=1)

    def whole(world: Any, gather: Any) -> Path:
        folder = tmp_path / f"machine{world.rank}"
        content = Content(tensors={"w": torch.arange(4.0)}, objects={"step": 1}, rank_objects={"mine": world.rank})
        return save(folder / "c", content, world=place(world), gather=gather, on_each_node=True)

    for rank, folder in enumerate(on_threads(whole, 2)):
        checkpoint = Checkpoint(folder)
        assert checkpoint.problems() == []
        assert torch.equal(checkpoint.read("w"), torch.arange(4.0))
        assert checkpoint.rank_objects(rank) == {"mine": rank}

    def sharded(world: Any, gather: Any) -> str:
        from echelon.checkpoint.regions import ShardPart

        content = Content(tensors={"w": ShardPart((4,), (2 * world.rank,), torch.zeros(2))})
        folder = tmp_path / f"machine{world.rank}" / "d"
        with pytest.raises(CheckpointError) as caught:
            save(folder, content, world=place(world), gather=gather, on_each_node=True)
        return str(caught.value)

    for text in on_threads(sharded, 2):
        assert "its chunks contain only 2 of 4 elements" in text
        assert "if each machine saves separately, every machine must have the whole state" in text


# ---- a disk that says no ---------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_old_checkpoint_and_reports_missing_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_on_threads(tmp_path / "c", 1, world_size=1)
    _fill_disk(monkeypatch, 3000)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path / "c", Content(tensors={"w": torch.zeros(2000)}, objects={"s": 1}), world=WORLD)
    # 8000 bytes of the tensor and 7 of {"s":1}; of the 3000 that there were, the file has all, and its header some.
    assert f"{tmp_path / 'c'} could not be saved: [Errno 28] No space left on device" in str(caught.value)
    assert "(rank 0 writes 8,007 bytes, and 0 bytes are free: 5,007 bytes are missing)" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert Checkpoint(tmp_path / "c").objects() == {"step": 1}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_small_file_system_that_fills_up(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        save(small / "c", Content(objects={"step": 1}), world=WORLD)
        with pytest.raises(CheckpointError, match=r"No space left on device.* bytes are missing"):
            save(small / "c", Content(tensors={"w": torch.zeros(100_000)}), world=WORLD)
        assert Checkpoint(small / "c").objects() == {"step": 1}
        assert [path.name for path in small.iterdir()] == ["c"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


# ---- in the background -----------------------------------------------------------------------------------------------


def test_a_background_save_writes_the_values_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, w, go, real = BackgroundSaver(), torch.arange(4.0), threading.Event(), storage.write
    monkeypatch.setattr(storage, "write", lambda handle, data: go.wait(30) and real(handle, data))
    rotated: list[Path] = []
    for step in range(3):
        w.fill_(step)
        content = Content(tensors={"w": w}, objects={"step": step})
        begun = begin_save(tmp_path / f"c_{step}", content, world=WORLD, on_committed=rotated.append)
        saver.start(begun)  # waits for the one before
        if step == 0:
            assert saver.is_busy
            address = begun.tensors[0][1].data_ptr()
            w.fill_(-1)
            go.set()
        assert begun.tensors[0][1].data_ptr() == address
    saver.wait()
    assert not saver.is_busy
    for step in range(3):
        assert torch.equal(Checkpoint(tmp_path / f"c_{step}").read("w"), torch.full((4,), float(step)))
    assert rotated == [tmp_path / f"c_{step}" for step in range(3)]


def test_the_next_call_raises_an_error_of_a_background_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = BackgroundSaver()
    content = Content(tensors={"w": torch.zeros(100)})
    with monkeypatch.context() as patch:
        _fill_disk(patch, 10)
        saver.start(begin_save(tmp_path / "c", content, world=WORLD))
        with pytest.raises(CheckpointError, match="No space left"):
            saver.start(begin_save(tmp_path / "d", content, world=WORLD))
    assert list(tmp_path.iterdir()) == []
    saver.wait()  # it is raised once
    saver.start(begin_save(tmp_path / "d", content, world=WORLD))
    saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.slow
def test_a_program_finishes_its_last_save_before_exit(tmp_path: Path) -> None:
    program = f"""
import time, torch
from pathlib import Path
from echelon.checkpoint.background_save import BackgroundSaver
from echelon.checkpoint.save import Content, begin_save, save
from echelon.checkpoint import storage
from echelon.world.world import World
write = storage.write
storage.write = lambda handle, data: (time.sleep(0.2), write(handle, data))
content = Content(tensors={{"w": torch.arange(4.0)}})
saver = BackgroundSaver()
saver.start(begin_save(Path({str(tmp_path)!r}) / "c", content, world=World.current(cpu=True)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.equal(Checkpoint(tmp_path / "c").read("w"), torch.arange(4.0))


# ---- which stay ------------------------------------------------------------------------------------------------------


def test_surplus_selects_the_checkpoints_to_delete() -> None:
    assert surplus([1, 2, 3, 4], limit=None) == []
    assert surplus([4, 1, 3, 2], limit=2) == [1, 2]
    assert surplus([1, 2, 3, 4], limit=0) == [1, 2, 3]
    assert surplus([1, 2, 3, 4], limit=2, keep=[1, 4]) == [2, 3]
    assert surplus([1, 2, 3, 4], limit=1, keep=[1, 4]) == [2, 3]
    assert surplus([10, 15, 20, 25, 30], limit=1, keep_every=10) == [15]


def test_rotation_deletes_only_the_oldest_checkpoints(tmp_path: Path) -> None:
    for name in ("checkpoint_1", "checkpoint_2", "checkpoint_10", "checkpoint_9.tmp-0123456789abcdef", "checkpoints"):
        (tmp_path / name).mkdir()
    save_on_threads(tmp_path / "checkpoint_3", 1, world_size=1)
    found = numbered(tmp_path, prefix="checkpoint_")
    assert [path.name for path in found] == ["checkpoint_1", "checkpoint_2", "checkpoint_3", "checkpoint_10"]
    gone = remove_oldest(tmp_path, prefix="checkpoint_", limit=2, keep=[tmp_path / "checkpoint_1"])
    assert [path.name for path in gone] == ["checkpoint_2", "checkpoint_3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint_1",
        "checkpoint_10",
        "checkpoint_9.tmp-0123456789abcdef",
        "checkpoints",
    ]


# ---- who may write ---------------------------------------------------------------------------------------------------

ME = Owner(token="a" * 16, host="h", machine="boot", processes="p", pid=5, started="100", run="", attempt=0, since="")


@pytest.mark.parametrize(
    ("owner", "silent_for", "owner_lives", "over"),
    [
        (ME, timedelta(0), True, True),
        (replace(ME, pid=6), timedelta(days=1), True, False),
        (replace(ME, pid=6), timedelta(0), False, True),
        (replace(ME, started="99"), timedelta(0), False, True),
        (replace(ME, processes="other"), timedelta(0), False, True),
        (replace(ME, processes="other", host="other"), timedelta(minutes=9), False, False),
        (replace(ME, machine="other"), timedelta(minutes=9), False, False),
        (replace(ME, machine="other"), timedelta(minutes=11), False, True),
        (replace(ME, machine=""), timedelta(minutes=9), False, False),
    ],
)
def test_when_a_lock_may_be_taken(owner: Owner, silent_for: timedelta, owner_lives: bool, over: bool) -> None:
    assert is_over(owner, ME, silent_for=silent_for, owner_lives=owner_lives) is over


@pytest.mark.parametrize(("mine", "theirs", "over"), [(1, 0, True), (0, 0, False), (0, 1, False)])
def test_a_later_attempt_of_a_run_takes_the_lock_of_the_earlier_one(mine: int, theirs: int, over: bool) -> None:
    me, owner = replace(ME, run="r", attempt=mine), replace(ME, run="r", attempt=theirs, pid=6)
    assert is_over(owner, me, silent_for=timedelta(0), owner_lives=True) is over
    assert not is_over(replace(owner, run="s"), me, silent_for=timedelta(0), owner_lives=True)


HOLDS = """
import sys, time
from pathlib import Path
from echelon.checkpoint.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def _holder(path: Path, **environ: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_rejected_until_the_first_ends(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with _holder(path) as process:
        with pytest.raises(CheckpointError) as caught:
            RunLock(path)
        assert f"process {process.pid} on " in str(caught.value)
        assert "last seen 0 s ago" in str(caught.value)
        process.kill()
        process.wait()
    lock = RunLock(path)
    lock.require()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_keeps_its_lock_during_long_computations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_BEAT_S", 0.01)
    path = tmp_path / ".lock"
    lock = RunLock(path)
    an_hour_ago = time.time() - 3600

    def is_touched(within_s: float) -> bool:
        os.utime(path, (an_hour_ago, an_hour_ago))
        deadline = time.monotonic() + within_s
        while path.stat().st_mtime == an_hour_ago and time.monotonic() < deadline:
            time.sleep(0.01)
        return path.stat().st_mtime != an_hour_ago

    assert is_touched(within_s=20)
    (beating,) = [thread for thread in threading.enumerate() if thread.name == f"lock {tmp_path.name}"]
    path.write_text(path.read_text().replace(lock._me.token, "b" * 16))
    beating.join(20)
    assert not beating.is_alive()  # it is another's: no sign of life for that one
    lock.release()
    assert path.exists()
    mine = RunLock(tmp_path / "other")
    assert any(thread.name == f"lock {tmp_path.name}" for thread in threading.enumerate())
    del mine  # nobody holds it: the thread ends, as the check after each test sees


ZOMBIE = """
import os, signal, sys
from pathlib import Path
import torch
from echelon import Accelerator
from echelon.base.errors import CheckpointError
from echelon.checkpoint import storage
from echelon.utils import ProjectConfiguration
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True))
model = accelerator.prepare(torch.nn.Linear(1, 1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sync_folder = storage.sync_folder
    def stops(path):
        sync_folder(path)
        if ".tmp-" in path.name:  # all is written, and the names are about to change
            os.kill(os.getpid(), signal.SIGSTOP)
    storage.sync_folder = stops
with torch.no_grad():
    model.weight.fill_(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
try:
    accelerator.save_state()
except CheckpointError as error:
    print("refused:", error.what)
"""


@pytest.mark.slow
def test_a_frozen_process_of_an_earlier_attempt_cannot_save_after_waking(tmp_path: Path) -> None:
    def start(attempt: int) -> subprocess.Popen[str]:
        environ = {**os.environ, "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": f"{attempt}"}
        command = [sys.executable, "-c", ZOMBIE, str(tmp_path)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)

    with start(0) as old:
        try:
            _, status = os.waitpid(old.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            with start(1) as new:
                assert new.communicate(timeout=120)[0] == ""
            assert new.returncode == 0
        finally:
            os.kill(old.pid, signal.SIGCONT)
        told = old.communicate(timeout=120)[0]
    assert told.startswith(f"refused: this process may no longer write checkpoints to {tmp_path / 'checkpoints'}")
    assert "r, attempt 1 holds it" in told
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [".lock", "checkpoint_0"]
    assert Checkpoint(tmp_path / "checkpoints" / "checkpoint_0").read("models.0.weight").item() == 1


def test_a_stale_rank_cannot_replace_a_checkpoint_of_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    old = RunLock(tmp_path / ".lock")
    zombie = begin_save(tmp_path / "c", Content(objects={"step": 1}), world=WORLD, fence=old.require)
    with _holder(tmp_path / ".lock", TORCHELASTIC_RESTART_COUNT="1") as process:
        save_on_threads(tmp_path / "c", 2, world_size=1)
        with pytest.raises(CheckpointError, match=r"may no longer write checkpoints to ") as caught:
            zombie.finish()
        assert f"process {process.pid} on " in str(caught.value)
        assert "r, attempt 1" in str(caught.value)
        old.release()  # not its own any more
        assert (tmp_path / ".lock").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert Checkpoint(tmp_path / "c").objects() == {"step": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "c"]


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"{}", b'{"token": 1}', b"\xff" * 10_000])
def test_an_invalid_lock_file_is_replaced(text: bytes, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunLock(tmp_path / ".lock").require()


def test_deletion_renames_a_checkpoint_first_and_then_removes_its_manifest() -> None:
    toy, folder = ToyStorage(), Path("/toy/run")
    with toy.used():
        for number in (1, 2):
            save_on_threads(folder / f"checkpoint_{number}", number, world_size=1)
        num_before = len(toy.calls)
        remove_oldest(folder, prefix="checkpoint_", limit=1)
    assert toy.calls[num_before : num_before + 3] == [
        ("rename", "checkpoint_1"),
        ("sync_folder", "run"),
        ("remove_file", "manifest.json"),
    ]
    assert toy.calls[-1][0] == "remove_folder"


def test_different_checkpoints_with_one_name_on_two_machines_are_not_loaded(tmp_path: Path) -> None:
    for rank in range(2):
        save_on_threads(tmp_path / f"machine{rank}" / "c", rank, world_size=1)
    found = on_threads(
        lambda world, gather: try_open(tmp_path / f"machine{world.rank}" / "c", world=world, gather=gather), 2
    )
    assert found == [(None, "this name refers to different checkpoints on different machines")] * 2
