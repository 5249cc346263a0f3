"""Checkpoints in object stores, in a store of obstore in this process; tests/unit/checkpoint/test_object_store_faults.py has S3."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from echelon import Accelerator, Trainer, TrainingArguments
from echelon.base.errors import CheckpointError, ConfigError, UsageError
from echelon.checkpoint import object_store, storage
from echelon.checkpoint.background_save import BackgroundSaver
from echelon.checkpoint.commit import clean
from echelon.checkpoint.listing import list_folder
from echelon.checkpoint.lock import RunLock
from echelon.checkpoint.object_store import ObjectPath, location
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.rotation import numbered, remove_oldest
from echelon.checkpoint.save import Content, PendingCheckpoint, SaveFailedError, begin_save, save
from echelon.cli.main import _run as main
from echelon.utils import ProjectConfiguration
from tests.checkpoint_ranks import content_of, on_threads, world_of_threads

pytest.importorskip("obstore")
WORLD = world_of_threads(0, 1)
NUMBERS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def runtime_of_obstore() -> None:
    """Start the threads of obstore, which live as long as the process, before a test's resources are counted."""
    object_store.exists(ObjectPath("memory://", "none"))


@pytest.fixture
def run() -> Iterator[ObjectPath]:
    """Yield an empty place in a store."""
    place = location(f"memory:///run{next(NUMBERS)}")
    assert isinstance(place, ObjectPath)
    yield place
    object_store.remove_all(place)


def test_a_user_names_a_place_by_its_url() -> None:
    assert location("s3://bucket//run/a/") == ObjectPath("s3://bucket", "run/a")
    assert str(location("gs://bucket/run") / "a") == "gs://bucket/run/a"  # type: ignore[operator]
    assert location("~/run") == Path("~/run").expanduser()
    for wrong in ("http://host/run", "s3:///run", "s3://bucket/a/../b", "s3:/bucket/run", Path("gs://bucket/run")):
        with pytest.raises(UsageError):
            location(wrong)


def test_ranks_save_to_a_store_and_load_from_it(run: ObjectPath) -> None:
    target = run / "checkpoint_1"
    on_threads(lambda world, gather: save(target, content_of(3, world.rank), world=world, gather=gather), 3)
    there, local = Checkpoint(target), {}
    assert there.problems() == there.problems(show=None) == []
    assert set(there.manifest.files) == set(object_store.objects_in(there.folder)) - {"manifest.json"}  # type: ignore[arg-type]
    for name in there.names():
        local[name] = there.read(name)
    assert local
    assert there.manifest.world_size == 3


def test_files_of_hooks_are_uploaded_by_the_rank_that_wrote_them(run: ObjectPath) -> None:
    def write(folder: Path, is_owner: bool) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "same.txt").write_text("same")
        (folder / f"owner_{is_owner}.txt").write_text("of one rank")

    folders: list[Path] = []

    def one(world, gather):  # type: ignore[no-untyped-def]
        pending = PendingCheckpoint(
            target=run / "c", world=world, gather=gather, collect=lambda _: Content(), write=write
        )
        pending.begin()
        folders.append(pending.files.folder_to_add())
        pending.finish()

    on_threads(one, 2)
    files = Checkpoint(run / "c").manifest.files
    assert {"sub/same.txt", "owner_True.txt", "owner_False.txt"} <= set(files)
    assert Checkpoint(run / "c").problems() == []
    assert not any(folder.exists() for folder in folders)

    def differs(folder: Path, is_owner: bool) -> None:
        (folder / "x").write_text(str(is_owner))

    def two(world, gather):  # type: ignore[no-untyped-def]
        PendingCheckpoint(
            target=run / "d", world=world, gather=gather, collect=lambda _: Content(), write=differs
        ).begin().finish()

    with pytest.raises(CheckpointError, match="wrote different files 'x' on several ranks"):
        on_threads(two, 2)
    assert not object_store.objects_in(run / "d")


def test_a_checkpoint_is_replaced_and_nothing_of_the_old_one_is_left(run: ObjectPath) -> None:
    save(run / "c", Content(objects={"step": 1}), world=WORLD)
    object_store.write_object(run / "c" / "note.txt", b"of the user")
    save(run / "c", Content(objects={"step": 2}), world=WORLD)
    assert Checkpoint(run / "c").objects() == {"step": 2}
    assert sorted(name.rpartition("/")[2] for name in object_store.objects_in(run / "c")) == [
        "manifest.json",
        "note.txt",
        "objects.json",
    ]


def test_a_save_without_its_manifest_is_no_checkpoint(run: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run / "checkpoint_1", Content(objects={"step": 1}), world=WORLD)
    begun = begin_save(run / "checkpoint_1", Content(objects={"step": 2}), world=WORLD)
    begun.files.write("objects.json", [b"x"], num_bytes=1)  # and the process is killed
    begin_save(run / "checkpoint_2", Content(), world=WORLD).files.write("objects.json", [b"x"], num_bytes=1)
    assert Checkpoint(run / "checkpoint_1").objects() == {"step": 1}
    assert [path.name for path in numbered(run, prefix="checkpoint_")] == ["checkpoint_1"]
    found = list_folder(run)
    assert [one.name for one in found.entries] == ["checkpoint_1"]
    assert [one.name for one in found.leftovers] == ["checkpoint_2"]
    cleaned = clean(run, belongs=lambda name: True)
    assert [name.partition("/")[0] for name in cleaned] == ["checkpoint_1", "checkpoint_2"]
    assert list_folder(run).leftovers == []
    assert Checkpoint(run / "checkpoint_1").objects() == {"step": 1}


def test_a_lost_file_is_found_before_the_commit(run: ObjectPath) -> None:
    save(run / "c", Content(objects={"step": 1}), world=WORLD)
    pending = begin_save(run / "c", Content(objects={"step": 2}), world=WORLD)
    real = pending._write

    def write(show):  # type: ignore[no-untyped-def]
        written = real(show)
        object_store.delete(pending.files.path / "objects.json")  # type: ignore[arg-type]
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingCheckpoint, "_write", lambda self, show: write(show))
        with pytest.raises(SaveFailedError, match=r"lacks objects\.json"):
            pending.finish()
    assert Checkpoint(run / "c").objects() == {"step": 1}


def test_rotation_deletes_manifests_before_other_files(run: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        save(run / f"checkpoint_{number}", Content(objects={"step": number}), world=WORLD)
    deleted: list[list[str]] = []
    real = object_store.delete
    monkeypatch.setattr(
        object_store, "delete", lambda *paths: (deleted.append([path.name for path in paths]), real(*paths))
    )
    removed = remove_oldest(run, prefix="checkpoint_", limit=1)
    assert [path.name for path in removed] == ["checkpoint_0", "checkpoint_1"]
    assert deleted == [["manifest.json"], ["objects.json"]] * 2
    assert [path.name for path in numbered(run, prefix="checkpoint_")] == ["checkpoint_2"]


def test_a_lock_goes_to_one_process_and_fences_the_one_before(run: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    old = RunLock(run / ".lock")
    old.require()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    new = RunLock(run / ".lock")
    new.require()
    with pytest.raises(CheckpointError, match="may no longer write checkpoints to memory:"):
        old.require()
    old.release()  # not its own any more
    new.require()
    assert list(object_store.objects_in(run)) == [".lock/00000002"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(CheckpointError, match=r"is locked by another run: process .*r, attempt 1, last seen 0 s ago"):
        RunLock(run / ".lock")
    new.release()
    assert not object_store.objects_in(run)


def test_a_store_has_no_other_formats(run: ObjectPath) -> None:
    with pytest.raises(UsageError, match="another program's format is not supported"):
        PendingCheckpoint(target=run / "c", world=WORLD, write=lambda folder, is_owner: None).begin()
    with pytest.raises(UsageError, match="save_on_each_node=True is not supported"):
        begin_save(run / "c", Content(), world=WORLD, on_each_node=True)


def test_a_folder_that_was_copied_to_a_store_is_a_checkpoint(run: ObjectPath, tmp_path: Path) -> None:
    weight = torch.randn(3)
    folder = save(tmp_path / "c", Content(tensors={"w": weight}), world=WORLD)
    assert isinstance(folder, Path)
    object_store.upload(folder, run / "c")
    assert torch.equal(Checkpoint(run / "c").read("w"), weight)
    object_store.download(object_store.place_of(run / "c"), tmp_path / "back")
    assert Checkpoint(tmp_path / "back").problems() == []
    assert storage.kind(run / "c") == "folder"
    assert storage.kind(run / "none") is None


def test_100_flipped_bits_are_found(run: ObjectPath) -> None:
    on_threads(lambda world, gather: save(run / "c", content_of(3, world.rank), world=world, gather=gather), 2)
    place = object_store.place_of(run / "c")
    contents = {name: object_store.read_object(place / name) for name in object_store.objects_in(place)}
    draw = random.Random(5)
    for _ in range(100):
        name = draw.choice(sorted(contents))
        flipped = bytearray(contents[name])
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        object_store.write_object(place / name, bytes(flipped))
        try:
            found = Checkpoint(run / "c").problems()
        except CheckpointError as error:
            found = [error.what]
        assert found, name
        object_store.write_object(place / name, contents[name])
    assert Checkpoint(run / "c").problems() == []


# ---- the levels ------------------------------------------------------------------------------------------------------


def test_a_run_of_the_accelerator_resumes_from_a_url(
    run: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start() -> tuple[Accelerator, torch.nn.Module]:
        project = ProjectConfiguration(str(run), automatic_checkpoint_naming=True, total_limit=2, keep_best=1)
        accelerator = Accelerator(cpu=True, project_config=project)
        return accelerator, accelerator.prepare(torch.nn.Linear(2, 2))

    accelerator, model = start()
    assert not accelerator.resume()
    for number in range(3):
        torch.nn.init.constant_(model.weight, number)
        saved = accelerator.save_state(blocking=number != 1, metric=abs(number - 1))
        assert saved == run / "checkpoints" / f"checkpoint_{number}"
    accelerator.save_model(model, f"{run}/exported")
    assert accelerator.best_checkpoint == run / "checkpoints" / "checkpoint_1"
    accelerator.end_training()
    assert str(accelerator.logging_dir) == str(tmp_path / run.name)
    assert [path.name for path in numbered(run / "checkpoints", prefix="checkpoint_")] == [
        "checkpoint_1",
        "checkpoint_2",
    ]

    accelerator, model = start()
    assert accelerator.resume(must_exist=True)
    assert model.weight.eq(2).all()
    accelerator.load_state(accelerator.best_checkpoint)
    assert model.weight.eq(1).all()
    accelerator.end_training()
    assert object_store.entries(run / "exported") == ["model.safetensors"]
    assert list(tmp_path.glob("echelon-*")) == []


def test_a_trainer_resumes_from_a_url(run: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.arange(64.0).reshape(64, 1) / 64

    def train(output_dir: str, max_steps: int) -> Trainer:
        torch.manual_seed(3)
        args = TrainingArguments(
            output_dir,
            max_steps=max_steps,
            lr_scheduler_type="constant",
            save_steps=2,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            resume_from_checkpoint="auto",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        loss = lambda outputs, labels: torch.nn.functional.mse_loss(outputs, labels)  # noqa: E731
        data = (x, 2 * x)
        trainer = Trainer(torch.nn.Linear(1, 1), args, train_dataset=data, eval_dataset=data, compute_loss_func=loss)
        trainer.train()
        return trainer

    train(str(run), 4)
    trainer = train(str(run), 8)
    reference = train("local", 8)  # the same, without an interruption and in a folder
    assert torch.equal(trainer.model.weight, reference.model.weight)
    assert trainer.state.best_model_checkpoint == f"{run}/checkpoint-8"
    assert [path.name for path in numbered(run, prefix="checkpoint-")] == ["checkpoint-6", "checkpoint-8"]
    trainer.save_model()
    assert "model.safetensors" in object_store.entries(run)
    assert sorted(path.name for path in (tmp_path / run.name).iterdir()) == []


# ---- in the background -----------------------------------------------------------------------------------------------


@pytest.mark.soak  # a clock
def test_training_waits_for_one_copy_in_memory(run: ObjectPath) -> None:
    tensors = {f"w{i}": torch.randn(1 << 20) for i in range(64)}  # 256 MB
    buffers = {name: tensor.clone() for name, tensor in tensors.items()}
    saver, blocked, copied = BackgroundSaver(), [], []
    for _ in range(8):  # the first one allocates the memory
        began = time.perf_counter()
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor)
        copied.append(time.perf_counter() - began)
        began = time.perf_counter()
        saver.start(begin_save(run / "c", Content(tensors=tensors), world=WORLD))
        blocked.append(time.perf_counter() - began)
        saver.wait()
    # The least of them, because other processes share the processors.
    assert min(blocked[1:]) < 1.2 * min(copied[1:]) + 0.005, (blocked, copied)


def test_the_next_save_waits_for_the_upload_before(run: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, order, saver = threading.Event(), [], BackgroundSaver()
    real = object_store.write_object

    def write(path: ObjectPath, content: object, *, num_bytes: int = 0) -> None:
        if path.parent.parent == run / "a":
            assert may_go.wait(60)
        real(path, content, num_bytes=num_bytes)
        order.append(f"{path.parent.parent.name} {path.name}")

    monkeypatch.setattr(object_store, "write_object", write)
    weight = torch.zeros(3)
    saver.start(begin_save(run / "a", Content(tensors={"w": weight}), world=WORLD))
    weight.fill_(1)  # training goes on
    assert not object_store.is_checkpoint(run / "a")  # and nobody has reported it
    threading.Timer(0.05, may_go.set).start()
    saver.start(begin_save(run / "b", Content(tensors={"w": weight}), world=WORLD))
    saver.wait()
    assert [one for one in order if "manifest" in one] == ["a manifest.json", "b manifest.json"]
    assert Checkpoint(run / "a").read("w").eq(0).all()
    assert Checkpoint(run / "b").read("w").eq(1).all()


EXITS = """
import os, sys, threading
import torch
from echelon.checkpoint import background_save, object_store
from echelon.checkpoint.save import Content, begin_save
from tests.checkpoint_ranks import world_of_threads
background_save._EXIT_POLL_S = 0.01
real, told = object_store.write_object, threading.Event()
background_save._logger.warning = lambda *arguments: (print(arguments[0] % arguments[1:]), told.set())
def write(path, content, **options):
    assert told.wait(60)  # the program has ended
    real(path, content, **options)
object_store.write_object = write
saver = background_save.BackgroundSaver()
place = object_store.location("memory:///run")
import atexit
saver.start(begin_save(place, Content(objects={"step": 3}), world=world_of_threads(0, 1)))
atexit.register(lambda: print("saved" if object_store.is_checkpoint(place) else "lost"))
"""


@pytest.mark.slow
def test_what_is_not_uploaded_at_exit_is_said_and_finished() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "the program has ended; it exits when the checkpoint memory:///run is uploaded",
        "saved",
    ]


def test_a_trainer_refuses_what_a_store_cannot_hold() -> None:
    for wrong in ({"push_to_hub": True}, {"save_on_each_node": True}, {"checkpoint_format": "transformers"}):
        with pytest.raises(ConfigError, match="does not work with output_dir=s3://bucket/run"):
            TrainingArguments("s3://bucket/run", use_cpu=True, report_to="none", **wrong)


def test_a_model_replaces_the_one_that_was_saved_before(run: ObjectPath) -> None:
    accelerator = Accelerator(cpu=True)
    for sizes, files in (
        ("5GB", ["model.safetensors"]),
        (40, [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)] + ["model.safetensors.index.json"]),
        ("5GB", ["model.safetensors"]),
    ):
        accelerator.save_model(torch.nn.Linear(5, 2), str(run), max_shard_size=sizes)
        assert object_store.entries(run) == files


@pytest.mark.filterwarnings("ignore:.*it holds no RNG states")
@pytest.mark.parametrize("layout", ["accelerate", "dcp"])
def test_foreign_checkpoints_are_converted_at_urls(
    layout: str, run: ObjectPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(source: object, out: object, *more: str) -> int:
        return main(["checkpoint", "convert", str(source), str(out), *more])

    accelerator = Accelerator(cpu=True)
    weight = accelerator.prepare(torch.nn.Linear(5, 2)).weight.detach()
    accelerator.save_state(str(tmp_path / "own"))
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    foreign = run / "foreign"
    assert convert(tmp_path / "own", foreign, "--format", layout) == 0, capsys.readouterr()
    for out in (run / "back", tmp_path / "back"):
        assert convert(foreign, out) == 0, capsys.readouterr()
        found = Checkpoint(out)
        assert not found.problems()
        assert torch.equal(found.read("models.0.weight"), weight)
        assert ("tokenizer.json" in found.manifest.files) is (layout == "accelerate")
    assert convert(tmp_path / "back", run / "again", "--format", layout) == 0, capsys.readouterr()
    assert convert(run / "back", run / "new") == 2
    assert "already has echelon's format" in capsys.readouterr().err
    assert convert(foreign, run / "back") == 2
    assert "already exists" in capsys.readouterr().err
    assert convert(run, tmp_path / "new") == 1
    assert "is not a checkpoint" in capsys.readouterr().err


def test_a_stale_run_cannot_commit(run: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    old = RunLock(run / ".lock")
    stale = begin_save(run / "c", Content(objects={"step": 1}), world=WORLD, fence=old.require)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    new = RunLock(run / ".lock")
    save(run / "c", Content(objects={"step": 2}), world=WORLD, fence=new.require)
    with pytest.raises(CheckpointError, match="may no longer write checkpoints to memory:"):
        stale.finish()
    new.release()
    assert Checkpoint(run / "c").objects() == {"step": 2}
    assert len(object_store.entries(run / "c")) == 1
