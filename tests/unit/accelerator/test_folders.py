"""Locations of checkpoints in every layout: symbolic links, a changed working directory, and failing disks."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from click.testing import CliRunner

from echelon.base.errors import CheckpointError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint.background_save import TooManyFailedSavesError
from echelon.cli.checkpoint import command
from echelon.trainer import Trainer
from echelon.utils import ProjectConfiguration
from tests.checkpoint_runs import Run
from tests.trainer_models import DATA, Line, arguments

TOKEN = "0123456789abcdef"
LAYOUTS = ["echelon", "accelerate"]
TRAINER_LAYOUTS = ["echelon", "transformers"]


def _trainer(folder: Path | str, layout: str = "echelon", **options: Any) -> Trainer:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_strategy": "no", **options}
    given = arguments(folder, checkpoint_format=layout, **settings)
    return Trainer(Line(), given, train_dataset=DATA, eval_dataset=DATA)


def _listed(folder: Path) -> list[str]:
    done = CliRunner().invoke(command, ["ls", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    return [f"{one['name']} {one['state']}" for one in json.loads(done.output)["entries"]]


# ---- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", ["project_dir", "checkpoints", "a checkpoint"])
def test_a_run_behind_a_link_resumes(what: str, layout: str, tmp_path: Path) -> None:
    project = tmp_path / "run"
    for value in (1.0, 2.0):
        run = Run(project, layout).train_to(value)
        run.accelerator.resume()
        run.train_to(value).accelerator.save_state()
        run.accelerator.end_training()
    moved = {"project_dir": project, "checkpoints": project / "checkpoints"}
    path = moved.get(what, project / "checkpoints" / "checkpoint_1")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere", target_is_directory=True)

    run = Run(project, layout, total_limit=2)
    assert run.accelerator.resume()
    assert run.value == 2.0
    state = "complete" if layout == "echelon" else "unknown"
    assert sorted(_listed(project)) == [f"checkpoint_{i} {state}" for i in (0, 1)]
    for value in (3.0, 4.0):  # the second one rotates checkpoint_1 away
        run.train_to(value).accelerator.save_state()
    run.accelerator.end_training()
    names = sorted(os.listdir(project / "checkpoints"))
    assert names == ["checkpoint_2", "checkpoint_3"]
    if what == "a checkpoint":  # of a link, only the link was deleted
        assert (tmp_path / "elsewhere").is_dir()
        assert os.listdir(tmp_path / "elsewhere")
    again = Run(project, layout)
    assert again.accelerator.resume()
    assert again.value == 4.0


@pytest.mark.parametrize("layout", TRAINER_LAYOUTS)
def test_a_trainer_behind_a_link_resumes(layout: str, tmp_path: Path) -> None:
    _trainer(tmp_path / "out", layout, max_steps=2).train()
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    trainer = _trainer(tmp_path / "out", layout)
    trainer.train(resume_from_checkpoint="auto")
    assert trainer.state.global_step == 4
    steps: list[int] = []
    _trainer(tmp_path / "out", layout, max_steps=6).train(resume_from_checkpoint=True)
    assert sorted(os.listdir(tmp_path / "elsewhere"))[:3] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert not steps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_broken_link_is_an_error_and_not_a_new_run(layout: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "checkpoints"
    link.symlink_to(tmp_path / "not mounted")
    with pytest.raises(UsageError, match=rf"{link} is a symbolic link to {tmp_path}/not mounted, which does not exist"):
        Run(tmp_path / "run", layout).accelerator.resume()
    with pytest.raises(UsageError, match=r"is a symbolic link to .*not mounted"):
        Run(None, layout, named=False).accelerator.resume(link)
    assert not (tmp_path / "not mounted").exists()
    link.unlink()
    run = Run(tmp_path / "run", layout).train_to(1.0)
    run.accelerator.save_state()
    run.accelerator.end_training()
    (link / "checkpoint_1").symlink_to(tmp_path / "gone")
    run = Run(tmp_path / "run", layout)
    with pytest.warns(EchelonWarning, match="checkpoint_1: .*symbolic link to .*gone"):
        assert run.accelerator.resume()
    assert run.value == 1.0
    assert "checkpoint_1 damaged" in _listed(tmp_path / "run")
    assert run.accelerator.save_state().name == "checkpoint_2"
    run.accelerator.end_training()
    assert not (tmp_path / "gone").exists()


def test_a_trainer_reports_an_output_folder_that_is_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "not mounted")
    with pytest.raises(UsageError, match=r"is a symbolic link to .*not mounted, which does not exist"):
        _trainer(tmp_path / "out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_named_checkpoint_behind_a_link_is_written_and_found_there(layout: str, tmp_path: Path) -> None:
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "a").symlink_to(tmp_path / "disk" / "a", target_is_directory=True)
    for value in (1.0, 2.0):
        run = Run(None, layout, named=False)
        assert run.accelerator.resume(tmp_path / "a") is (value == 2.0)
        run.train_to(value).accelerator.save_state(tmp_path / "a")
    (tmp_path / "disk" / "a").rename(tmp_path / "disk" / f"a.old-{TOKEN}")  # a crash between two renames
    run = Run(None, layout, named=False)
    assert run.accelerator.resume(tmp_path / "a")
    assert run.value == 2.0
    run.train_to(3.0).accelerator.save_state(tmp_path / "a")
    assert (tmp_path / "a").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["a"]


# ---- a change of the working directory -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_relative_project_dir_does_not_depend_on_the_working_directory(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    config = ProjectConfiguration("run", logging_dir="logs", automatic_checkpoint_naming=True)
    assert (config.project_dir, config.logging_dir) == (str(tmp_path / "start/run"), str(tmp_path / "start/logs"))
    run = Run("run", layout).train_to(1.0)
    run.accelerator.save_state()
    monkeypatch.chdir(tmp_path / "later")
    run.train_to(2.0).accelerator.save_state()
    run.accelerator.end_training()
    monkeypatch.chdir(tmp_path / "start")
    run = Run("run", layout)
    monkeypatch.chdir(tmp_path / "later")
    assert run.accelerator.resume()
    assert run.value == 2.0
    assert os.listdir(tmp_path / "later") == []


@pytest.mark.parametrize("layout", TRAINER_LAYOUTS)
def test_a_relative_output_dir_does_not_depend_on_the_working_directory(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    trainer = _trainer("out", layout, **options)
    monkeypatch.chdir(tmp_path / "later")
    trainer.train()
    trainer.save_model()
    assert trainer.args.output_dir == "out"  # as it was given
    assert os.listdir(tmp_path / "later") == []
    assert str(trainer.state.best_model_checkpoint).startswith("out/checkpoint-")
    again = _trainer(tmp_path / "start" / "out", layout, max_steps=6)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6


# ---- nothing is there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_without_checkpoints_logs_one_line_or_raises(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "scratch" in record.getMessage()]
        caplog.clear()
        return found

    named = Run(tmp_path / "run", layout)
    assert named.accelerator.resume() is False
    assert told() == [f"no checkpoint in {tmp_path}/run/checkpoints: starting from scratch"]
    with pytest.raises(UsageError, match=r"(?s)no checkpoint found in .*run/checkpoints.*must_exist=True"):
        named.accelerator.resume(must_exist=True)
    by_path = Run(None, layout, named=False)
    for make in (lambda: None, (tmp_path / "a").mkdir):  # a folder that the script has made for it
        make()
        assert by_path.accelerator.resume(tmp_path / "a") is False
        assert told() == [f"no checkpoint in {tmp_path}/a: starting from scratch"]
        with pytest.raises(UsageError, match=r"(?s)no checkpoint found in .*a.*must_exist=True"):
            by_path.accelerator.resume(tmp_path / "a", must_exist=True)
    by_path.accelerator.save_state(tmp_path / "a")
    assert by_path.accelerator.resume(tmp_path / "a", must_exist=True)
    assert told() == []


def test_auto_logs_one_line_if_training_starts_from_scratch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _trainer(tmp_path, max_steps=2).train(resume_from_checkpoint="auto")
    line = f"no checkpoint in {tmp_path}: starting from scratch"
    assert [r.getMessage() for r in caplog.records if "scratch" in r.getMessage()] == [line]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_that_is_not_a_checkpoint_is_not_a_new_run(layout: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "checkpoints" / "checkpoint_4").mkdir(parents=True)
    run = Run(None, layout, named=False)
    with pytest.raises(UsageError, match=f"{tmp_path}/file exists and is a file"):
        run.accelerator.resume(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"(?s)is not a checkpoint.*do: .*run/checkpoints/checkpoint_4"):
        run.accelerator.resume(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").write_text("mine")
    with pytest.raises(UsageError, match="other/checkpoints exists and is a file"):
        Run(tmp_path / "other", layout).accelerator.resume()


# ---- what killed saves leave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("named", [True, False])
def test_a_crash_between_two_renames_is_not_a_new_run(named: bool, layout: str, tmp_path: Path) -> None:
    project, path = (tmp_path, None) if named else (None, tmp_path / "checkpoints" / "checkpoint_0")
    run = Run(project, layout, named=named).train_to(1.0)
    run.accelerator.save_state(path)
    run.accelerator.end_training()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_0").rename(folder / f"checkpoint_0.old-{TOKEN}")
    again = Run(project, layout, named=named)
    assert again.accelerator.resume(path)
    assert again.value == 1.0
    again.train_to(2.0).accelerator.save_state(path)
    again.accelerator.end_training()
    expected = ["checkpoint_0", "checkpoint_1"] if named else ["checkpoint_0"]
    assert sorted(os.listdir(folder)) == expected
    last = Run(project, layout, named=named)
    assert last.accelerator.resume(path)
    assert last.value == 2.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_start_removes_leftovers_of_killed_saves(layout: str, tmp_path: Path) -> None:
    run = Run(tmp_path, layout).train_to(1.0)
    run.accelerator.save_state()
    run.accelerator.end_training()
    folder = tmp_path / "checkpoints"
    for name in (f"checkpoint_1.tmp-{TOKEN}", f"notes.tmp-{TOKEN}"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"cut off")
    again = Run(tmp_path, layout)
    assert again.accelerator.resume()
    again.accelerator.save_state()
    again.accelerator.end_training()
    assert sorted(os.listdir(folder)) == ["checkpoint_0", "checkpoint_1", f"notes.tmp-{TOKEN}"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_run_in_one_project_is_rejected(layout: str, tmp_path: Path) -> None:
    run = Run(tmp_path, layout)
    run.accelerator.save_state()
    # Accelerate's load_state takes whatever is in the folder for a checkpoint.
    lock = tmp_path / (".checkpoints.lock" if layout == "accelerate" else "checkpoints/.lock")
    assert lock.exists()
    run.accelerator.end_training()
    assert not lock.exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_save_removes_leftovers_of_a_killed_save(layout: str, tmp_path: Path) -> None:
    left = tmp_path / f"a.tmp-{TOKEN}"
    young = tmp_path / f"a.tmp-{TOKEN[::-1]}"
    for folder in (left, young):
        folder.mkdir()
        (folder / "x").write_text("cut off")
    for path in (left / "x", left):
        os.utime(path, (1e9, 1e9))
    Run(None, layout, named=False).accelerator.save_state(tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["a", young.name]  # which somebody may be writing now


# ---- a disk that says no ---------------------------------------------------------------------------------------------


@contextmanager
def full_disk(num_bytes: int = 200) -> Iterator[None]:
    """Let no file of this process grow beyond ``num_bytes``: the error comes from the system, as that of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_is_tolerated_in_every_layout(layout: str, tmp_path: Path) -> None:
    run = Run(tmp_path, layout).train_to(1.0)
    run.accelerator.save_state()
    run.train_to(2.0)
    with full_disk():
        for _ in range(2):
            with pytest.warns(EchelonWarning, match=r"(?s)checkpoint_1 could not be saved: .*\n.*Training continues"):
                run.accelerator.save_state()
    run.accelerator.save_state()
    with full_disk():
        for _ in range(2):
            with pytest.warns(EchelonWarning, match="1 of at most 3|2 of at most 3"):
                run.accelerator.save_state()
        with pytest.raises(TooManyFailedSavesError, match="File too large"):
            run.accelerator.save_state()
    run.accelerator.end_training()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_1"]
    again = Run(tmp_path, layout)
    assert again.accelerator.resume()
    assert again.value == 2.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_error_in_a_hook_does_not_end_the_run(layout: str, tmp_path: Path) -> None:
    run = Run(tmp_path, layout)

    def hook(models: Any, weights: Any, folder: str) -> None:
        with full_disk():
            torch.save({"x": torch.zeros(1000)}, f"{folder}/mine.pt")

    run.accelerator.register_save_state_pre_hook(hook)
    with pytest.warns(EchelonWarning, match="checkpoint_0 could not be saved"):
        run.accelerator.save_state()
    run.accelerator.end_training()
    assert os.listdir(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("layout", TRAINER_LAYOUTS)
def test_a_trainer_tolerates_a_full_disk_in_every_layout(layout: str, tmp_path: Path) -> None:
    _trainer(tmp_path, layout, max_steps=2).train()
    trainer = _trainer(tmp_path, layout, max_steps=6)
    before = trainer._save_checkpoint

    def save(*arguments: Any) -> None:
        with full_disk() if trainer.state.global_step == 4 else full_disk(1 << 30):
            before(*arguments)

    trainer._save_checkpoint = save  # type: ignore[method-assign]
    with pytest.warns(EchelonWarning, match="checkpoint-4 could not be saved"):
        trainer.train(resume_from_checkpoint=True)
    assert sorted(name for name in os.listdir(tmp_path) if "checkpoint" in name) == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_that_cannot_be_created_is_tolerated(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, layout)
    mkdir = Path.mkdir

    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        if ".tmp-" in self.name:
            raise OSError(28, "No space left on device", str(self))
        mkdir(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.warns(EchelonWarning, match="checkpoint_0 could not be saved: .*No space left"):
        run.accelerator.save_state()
    monkeypatch.undo()
    run.accelerator.save_state()
    run.accelerator.end_training()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_name_that_is_too_long_is_rejected_before_writing(layout: str, tmp_path: Path) -> None:
    run = Run(None, layout, named=False)
    with pytest.raises(UsageError, match=r"(?s)has 250 bytes.*do: +use a name of at most 234"):
        run.accelerator.save_state(tmp_path / ("x" * 250))
    assert os.listdir(tmp_path) == []
    run.accelerator.save_state(tmp_path / ("x" * 234))


# ---- what is damaged -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["a file in its place", "cut off", "a file is missing", "an empty folder"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_checkpoint_is_skipped(layout: str, damage: str, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        run = Run(tmp_path, layout)
        run.accelerator.resume()
        run.train_to(value).accelerator.save_state()
        run.accelerator.end_training()
    last = tmp_path / "checkpoints" / "checkpoint_1"
    victim = last / ("rank_00000.safetensors" if layout == "echelon" else "optimizer.bin")
    if damage == "cut off":
        victim.write_bytes(victim.read_bytes()[:-40])
    elif damage == "a file is missing":
        victim.unlink()
    else:
        for path in last.iterdir():
            path.unlink()
        if damage == "a file in its place":
            last.rmdir()
            last.write_text("mine")
    run = Run(tmp_path, layout)
    with pytest.warns(EchelonWarning, match="(?s)newer checkpoints are incomplete and were skipped.*checkpoint_1: "):
        assert run.accelerator.resume()
    assert run.value == 1.0
    assert run.accelerator.save_state().name == "checkpoint_2"
    run.accelerator.end_training()


def test_the_newest_checkpoint_is_chosen_independently_of_its_layout(tmp_path: Path) -> None:
    for value, layout in ((1.0, "echelon"), (2.0, "accelerate"), (3.0, "echelon"), (4.0, "accelerate")):
        run = Run(tmp_path, layout)
        run.accelerator.resume()
        assert run.value == value - 1
        run.train_to(value).accelerator.save_state()
        run.accelerator.end_training()


def _rewritten(manifest: Path, old: bytes, new: bytes) -> None:
    """Change the body of a manifest, with its checksum, as a damaged writer would."""
    text = manifest.read_bytes()
    start = text.index(b'"manifest":') + len(b'"manifest":')
    body = text[start:-2].replace(old, new)
    assert body != text[start:-2]
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    manifest.write_bytes(b'{"xxh3_128":"' + digest + b'","manifest":' + body + b"}\n")


@pytest.mark.parametrize("name", [rb"\ud800.txt", rb"\udc80.txt", rb"a\u0000b", b"x" * 300])
def test_an_invalid_file_name_in_the_manifest_is_damage(name: bytes, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        run = Run(tmp_path)
        run.accelerator.resume()
        if value == 2.0:
            run.accelerator.register_save_state_pre_hook(lambda *_: Path(_[2], "extra.txt").write_text("x"))
        run.train_to(value).accelerator.save_state()
        run.accelerator.end_training()
    _rewritten(tmp_path / "checkpoints/checkpoint_1/manifest.json", b"extra.txt", name)
    run = Run(tmp_path)
    with pytest.warns(EchelonWarning, match="(?s)were skipped.*checkpoint_1: "):
        assert run.accelerator.resume()
    assert run.value == 1.0
    assert "checkpoint_1 damaged" in _listed(tmp_path)


def test_a_hooks_file_with_an_invalid_name_is_rejected(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.accelerator.register_save_state_pre_hook(
        lambda *_: Path(os.fsdecode(os.fsencode(_[2]) + b"/\xff.txt")).write_text("x")
    )
    with pytest.raises(CheckpointError, match=re.escape(r"'\udcff.txt'")):
        run.accelerator.save_state()
    run.accelerator.end_training()
    assert os.listdir(tmp_path / "checkpoints") == []
