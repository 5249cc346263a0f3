"""save_state and load_state in Accelerate's layout; promises that hold for every layout are also tested in echelon's."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration, GradScalerKwargs
from echelon.base.errors import CheckpointError, DesyncError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from echelon.utils import ProjectConfiguration, load, load_state_dict
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import all_warnings, train_prepared, weights_of
from tests.ranks.accelerator.test_epochs import Result, _Case, _objects, _plain

ROOT = Path(__file__).resolve().parents[3]
WRITTEN_BY_ACCELERATE = ROOT / "tests" / "data" / "accelerate_state"
PEERS = ROOT / ".venv-peers" / "bin" / "python"


@pytest.fixture(autouse=True)
def accelerates_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CHECKPOINT_FORMAT", "accelerate")


def _interrupted(folder: str, case: _Case, stop: tuple[int, int], stateful: bool) -> Result:
    """Train to step ``stop[1]`` of epoch ``stop[0]`` and save; rebuild all objects, load, and train to the end."""
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)

    def prepared(seed: int) -> tuple[Accelerator, Any, Any, Any, Any]:
        accelerator = Accelerator(dataloader_config=config)
        return accelerator, *accelerator.prepare(*_objects(case, seed))

    accelerator, model, optimizer, scheduler, loader = prepared(3)
    for epoch in range(stop[0] + 1):
        for i, x in enumerate(loader):
            train_prepared(accelerator, model, optimizer, [x], schedule=scheduler)
            if (epoch, i + 1) == stop:
                accelerator.save_state(folder)
                break
    accelerator.free_memory()
    accelerator, model, optimizer, scheduler, loader = prepared(99)
    accelerator.load_state(folder)
    skipped = stop[1] % len(loader)
    for epoch in range(stop[0] + (skipped == 0), case.epochs):
        again = loader
        if epoch == stop[0] and not stateful:
            again = accelerator.skip_first_batches(loader, skipped)
        train_prepared(accelerator, model, optimizer, again, schedule=scheduler)
    return weights_of(accelerator, model), scheduler.get_last_lr(), torch.rand(()).item()


def _both(folder: str, stop: tuple[int, int], generator: bool, stateful: bool) -> tuple[Result, Result]:
    case = _Case(n=32, epochs=3, has_generator=generator)
    return _plain(case), _interrupted(folder, case, stop, stateful)


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("generator", [False, True], ids=["global-rng", "own-generator"])
@pytest.mark.parametrize("middle", [False, True], ids=["at-the-end", "in-the-middle"])
def test_a_resumed_run_matches_the_plain_loop_bit_for_bit(
    world_size: int, generator: bool, middle: bool, tmp_path: Path
) -> None:
    # Dropout, the order of the samples, AdamW's moments and the schedule: each would show in the weights.
    stop = (1, 3 if middle else 8 // world_size)
    for plain, resumed in run_on_ranks(_both, str(tmp_path / "s"), stop, generator, False, world_size=world_size):
        assert all(map(torch.equal, plain[0], resumed[0]))
        assert plain[1:] == resumed[1:]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stateful_loader_resumes_by_itself(world_size: int, tmp_path: Path) -> None:
    for plain, resumed in run_on_ranks(_both, str(tmp_path / "s"), (1, 2), False, True, world_size=world_size):
        assert all(map(torch.equal, plain[0], resumed[0]))
    saved = torch.load(tmp_path / "s" / "dl_state_dict.bin", weights_only=True)
    assert (saved["_num_yielded"], saved["_iterator_finished"]) == (2, False)  # the form that torchdata reads


def test_accelerates_position_is_accepted_and_one_of_other_process_counts_rejected(tmp_path: Path) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)

    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(dataloader_config=config)
        return accelerator, accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=2))

    accelerator, loader = prepared()
    for i, _ in enumerate(loader):
        if i == 1:
            folder = accelerator.save_state(tmp_path / "s")
            break
    assert [x.tolist() for (x,) in prepared()[1]][:1] == [[0, 1]]
    with pytest.raises(CheckpointError, match="stores data positions for 1 process, but this is rank 1 of 1"):
        load_accelerator_state(folder, [], [], [], [prepared()[1]], 1)
    position = load(folder / "dl_state_dict.bin")
    position["echelon"]["inner_of_others"] = [None]
    torch.save(position, folder / "dl_state_dict.bin")
    with pytest.raises(CheckpointError, match="stores data positions for 2 processes, but this is rank 0 of 1"):
        prepared()[0].load_state(folder)
    for file in ("dl_state_dict.bin", "random_states_0.pkl"):
        content = load(folder / file)
        del content["echelon"]
        torch.save(content, folder / file)
    (folder / "sampler.bin").unlink()
    accelerator, loader = prepared()
    accelerator.load_state(folder)
    assert [x.tolist() for (x,) in loader] == [[4, 5], [6, 7], [8, 9]]


def _resume_scaler(folder: str) -> list[dict[str, Any]]:
    states = []
    for is_new in (True, False):
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
        model = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if not is_new:
            accelerator.load_state(folder)
        else:
            for _ in range(3):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(folder)
        assert accelerator.scaler is not None
        states.append(accelerator.scaler.state_dict())
    return states


def test_the_loss_scale_counts_the_step_before_saving(tmp_path: Path) -> None:
    saved, loaded = _resume_scaler(str(tmp_path / "s"))
    assert saved["_growth_tracker"] == 3
    assert (tmp_path / "s" / "scaler.pt").exists()
    assert loaded == saved


def _fail_on_rank_one(folder: str, limit: int | None) -> tuple[str, list[str], dict[str, float], int]:
    """Save, save again with a write that fails on rank 1; return the error and what is there afterwards."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=limit is not None, total_limit=limit)
    accelerator = Accelerator(project_config=project)
    model = accelerator.prepare(nn.Linear(1, 1))
    target = None if limit is not None else f"{folder}/state"

    def weight_is(value: float) -> None:
        with torch.no_grad():
            accelerator.unwrap_model(model).weight.fill_(value)

    def fails(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if accelerator.process_index == 1:
            raise OSError(28, "No space left on device", output_dir)

    weight_is(1.0)
    accelerator.save_state(target)
    weight_is(2.0)
    handle = accelerator.register_save_state_pre_hook(fails)
    with all_warnings() as caught:
        accelerator.save_state(target)
    handle.remove()
    accelerator.wait_for_everyone()
    parent = Path(folder) / "checkpoints" if limit is not None else Path(folder)
    names = sorted(path.name for path in parent.iterdir() if path.name != ".lock")
    accelerator.load_state(target)
    kept = accelerator.unwrap_model(model).weight.item()
    weight_is(3.0)
    accelerator.save_state(target)
    after = sorted(path.name for path in parent.iterdir() if path.name != ".lock")
    accelerator.load_state(target)
    values = {"kept": kept, "replaced": accelerator.unwrap_model(model).weight.item()}
    accelerator.end_training()
    return "".join(str(one.message) for one in caught), [*names, "then", *after], values, project.iteration


@pytest.mark.parametrize("limit", [None, 1], ids=["same-path", "total_limit=1"])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_old_checkpoint(
    limit: int | None, tmp_path: Path
) -> None:
    old, new = ("state", "state") if limit is None else ("checkpoint_0", "checkpoint_1")
    for rank, (text, names, values, iteration) in enumerate(run_on_ranks(_fail_on_rank_one, str(tmp_path), limit)):
        # A warning of rank zero; a third time in a row ends the run (max_failed_saves).
        found = re.search(
            r"(?s)failed on other ranks\n    rank 1: .*: \[Errno 28\] No space left on device.*Training continues", text
        )
        assert bool(found) is (rank == 0), text
        assert "rank 0:" not in text
        assert names == [old, "then", new]
        assert values == {"kept": 1.0, "replaced": 3.0}
        assert iteration == 2


def _load_with_one_file_less(folder: str) -> str:
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        os.unlink(f"{folder}/random_states_1.pkl")
    accelerator.wait_for_everyone()
    with pytest.raises(DesyncError) as caught:
        accelerator.load_state(folder)
    return str(caught.value)


def test_a_missing_file_on_one_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for text in run_on_ranks(_load_with_one_file_less, str(tmp_path / "s")):
        assert "rank 1: CheckpointError" in text
        assert f"{tmp_path / 's'} has no random_states_1.pkl" in text


def _load_on_more(folder: str) -> tuple[float, int]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.load_state(folder)
    return accelerator.unwrap_model(model).weight.item(), accelerator.step


def test_loading_on_more_processes_warns(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.step = 5
    accelerator.save_state(tmp_path / "s")
    with pytest.raises(
        RanksFailed, match="contains RNG states for 1 process"
    ) as caught:  # warnings are errors in tests
        run_on_ranks(_load_on_more, str(tmp_path / "s"))
    assert isinstance(caught.value.errors[0], DesyncError | EchelonWarning)
    assert _load_on_more(str(tmp_path / "s")) == (model.weight.item(), 5)


# ---- Accelerate's own files ------------------------------------------------------------------------------------------


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def _like_accelerates() -> tuple[Accelerator, Any, Any, Any, _Counter]:
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    counter = _Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler), counter


def _load_accelerates(folder: str) -> tuple[dict[str, Any], int]:
    accelerator, model, optimizer, scheduler, counter = _like_accelerates()
    accelerator.load_state(folder)
    found = {
        "weight": model.weight.tolist(),
        "bias": model.bias.tolist(),
        "exp_avg": optimizer.state_dict()["state"][0]["exp_avg"].tolist(),
        "lr": scheduler.get_last_lr(),
        "step": accelerator.step,
        "drawn": [torch.rand(()).item(), float(np.random.rand()), random.random()],
    }
    return found, counter.count


def test_checkpoints_of_accelerate_are_loaded() -> None:
    found, count = _load_accelerates(str(WRITTEN_BY_ACCELERATE))
    assert found == json.loads((WRITTEN_BY_ACCELERATE / "expected.json").read_text())
    assert found["drawn"][0] == torch.rand((), generator=torch.Generator().manual_seed(11)).item()
    assert count == 3


_IN_ACCELERATE = """
import sys, json, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
class Counter(dict):
    def state_dict(self): return dict(self)
    def load_state_dict(self, state): self.update(state)
counter = Counter()
accelerator.register_for_checkpointing(counter)
accelerator.load_state(sys.argv[1])
state = optimizer.state_dict()["state"]
print(json.dumps([model.weight.tolist(), state[0]["exp_avg"].tolist(), scheduler.get_last_lr(), accelerator.step,
                  torch.rand(()).item(), counter["count"]]))
accelerator.save_state(sys.argv[2])
"""


def test_accelerate_and_echelon_load_each_others_checkpoints(tmp_path: Path) -> None:
    if not PEERS.exists():
        pytest.skip(f"{PEERS} is missing: make peers")
    accelerator, model, optimizer, scheduler, counter = _like_accelerates()
    counter.count = 4
    accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum())
    optimizer.step()
    scheduler.step()
    accelerator.step = 6
    torch.manual_seed(21)
    accelerator.save_state(tmp_path / "here")
    expected = [
        model.weight.tolist(),
        optimizer.state_dict()["state"][0]["exp_avg"].tolist(),
        scheduler.get_last_lr(),
        6,
        torch.rand((), generator=torch.Generator().manual_seed(21)).item(),
        4,
    ]
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    command = [str(PEERS), "-c", _IN_ACCELERATE, str(tmp_path / "here"), str(tmp_path / "there")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    with torch.no_grad():
        model.weight.zero_()
    counter.count = 0
    accelerator.load_state(tmp_path / "there")
    assert [model.weight.tolist(), optimizer.state_dict()["state"][0]["exp_avg"].tolist()] == expected[:2]
    assert counter.count == 4


# ---- one process -----------------------------------------------------------------------------------------------------


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize(
    "file", ["random_states_0.pkl", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "pytorch_model.bin"]
)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "bare-pickle"])
def test_a_file_that_contains_code_is_rejected_and_not_run(file: str, legacy: bool, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(WRITTEN_BY_ACCELERATE, folder)
    if file == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    mark = tmp_path / "it-was-run"
    torch.save({"step": 1, "x": _Evil(mark)}, folder / file, _use_new_zipfile_serialization=not legacy)
    accelerator = _like_accelerates()[0]
    with pytest.raises(
        CheckpointError,
        match=rf"{file} was not loaded, because it could run code: it contains (posix|nt)\.system, which is not plain data",
    ):
        accelerator.load_state(folder)
    assert not mark.exists()
    with pytest.raises((UsageError, CheckpointError), match=r"not plain data|would run any code"):
        accelerator.load_state(folder, load_kwargs={"weights_only": False})
    assert not mark.exists()


def _saved(tmp_path: Path) -> tuple[Accelerator, nn.Module, Path]:
    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = accelerator.prepare(model, optimizer)
    return accelerator, model, accelerator.save_state(tmp_path / "s")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
def test_a_missing_or_damaged_file_is_named_before_loading(file: str, tmp_path: Path) -> None:
    accelerator, model, folder = _saved(tmp_path)
    whole = (folder / file).read_bytes()
    before = model.weight.detach().clone()
    (folder / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        accelerator.load_state(folder)
    (folder / file).unlink()
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(CheckpointError, match=f"has no {file}"):
        accelerator.load_state(folder)
    assert not model.weight.any()
    assert before.any()
    with pytest.raises(UsageError, match="does not exist"):
        accelerator.load_state(tmp_path / "elsewhere")


@pytest.mark.parametrize("safe", [True, False])
def test_the_files_have_accelerates_names(safe: bool, tmp_path: Path) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    models = [nn.Linear(2, 1), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer) for optimizer in optimizers]
    loaders = [DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2, shuffle=True) for _ in range(2)]
    prepared = accelerator.prepare(*models, *optimizers, *schedulers, *loaders)
    accelerator.register_for_checkpointing(_Counter(), _Counter())
    loader = prepared[-1]
    loader.set_epoch(4)
    first = [batch[0].tolist() for batch in loader]
    loader.set_epoch(4)
    folder = accelerator.save_state(tmp_path / "s", safe_serialization=safe)
    weights = {"model.safetensors", "model_1.safetensors"} if safe else {"pytorch_model.bin", "pytorch_model_1.bin"}
    assert {path.name for path in folder.iterdir()} == weights | {
        *("optimizer.bin", "optimizer_1.bin", "scheduler.bin", "scheduler_1.bin", "sampler.bin", "sampler_1.bin"),
        *("random_states_0.pkl", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"),
    }
    saved = models[1].weight.tolist()
    with torch.no_grad():
        models[1].weight.zero_()
    loader.set_epoch(0)
    torch.manual_seed(123)  # a seedable order has its seed from here, when none is given
    accelerator.load_state(folder)
    assert models[1].weight.tolist() == saved
    assert [batch[0].tolist() for batch in loader] == first


def test_saving_to_the_same_path_replaces_the_state_and_keeps_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
    accelerator.save_state(folder)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("kept")
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.save_state(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "notes", "random_states_0.pkl"]
    assert (folder / "notes" / "mine.txt").read_text() == "kept"
    assert os.listdir(tmp_path) == ["s"]


def test_a_folder_that_cannot_be_replaced_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s").mkdir()
    monkeypatch.chdir(tmp_path / "s")
    accelerator = Accelerator()
    with pytest.raises(UsageError, match=r"contains the working directory .* cannot be replaced"):
        accelerator.save_state(".")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="exists and is a file, not a directory"):
        accelerator.save_state(tmp_path / "file")
    with pytest.raises(UsageError, match="was called without a folder"):
        accelerator.save_state()
    with pytest.raises(UsageError, match="got tag, which the single engine does not support"):
        accelerator.save_state("x", tag=3)


class _Holds(_Counter):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"nested": [(1, {"value": self.value})]}


def test_objects_that_cannot_be_loaded_are_rejected_at_registration_and_saving(tmp_path: Path) -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match=r"these arguments lack state_dict or load_state_dict: 1 \(int\)"):
        accelerator.register_for_checkpointing(_Counter(), 3)
    with pytest.raises(UsageError, match=r"the state of _Holds contains pathlib\.PosixPath, which is not plain data"):
        accelerator.register_for_checkpointing(_Holds(Path("x")))
    assert accelerator._custom_objects == []
    plain = _Holds({"t": torch.ones(2), "a": np.arange(3.0), "n": np.float64(1.5), "b": b"x", "s": {1, 2}})
    accelerator.register_for_checkpointing(plain)
    assert accelerator._custom_objects == [plain]
    accelerator.save_state(tmp_path / "s")
    plain.value = Path("x")
    with pytest.raises(CheckpointError, match=r"the state for custom_checkpoint_0\.pkl contains pathlib\.PosixPath"):
        accelerator.save_state(tmp_path / "s")
    assert os.listdir(tmp_path) == ["s"]
    other = Accelerator()
    with pytest.raises(RuntimeError, match=r"contains the states of 1 registered objects .* but 0 are registered"):
        other.load_state(tmp_path / "s")


def test_numbered_checkpoints_are_kept_up_to_the_limit_and_the_newest_is_loaded(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    model = accelerator.prepare(nn.Linear(1, 1))
    checkpoints = tmp_path / "checkpoints"
    for number in range(12):
        with torch.no_grad():
            model.weight.fill_(number)
        assert accelerator.save_iteration == number
        accelerator.save_state("this is not read")
        (checkpoints / "checkpoint_99.tmp-abc").mkdir(exist_ok=True)  # of nobody who saves here
    names = sorted(p.name for p in checkpoints.iterdir())
    assert names == ["checkpoint_10", "checkpoint_11", "checkpoint_99.tmp-abc"]
    accelerator.load_state()
    assert model.weight.item() == 11.0
    project.iteration = 11
    with pytest.raises(
        ValueError, match=r"checkpoint_11 already exists\n.*do:    set .*project_configuration.iteration"
    ):
        accelerator.save_state()
    accelerator.end_training()
    assert len(list(checkpoints.iterdir())) == 3


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(10, 3)


def test_tied_weights_are_stored_once_and_restored_tied(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(_Tied())
    folder = accelerator.save_state(tmp_path / "s")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["embed.weight", "out.bias", "out.weight"]
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    saved = model.embed.weight.tolist()
    with torch.no_grad():
        model.embed.weight.zero_()
    accelerator.load_state(folder)
    assert model.head.weight.tolist() == saved


def test_all_parts_of_one_storage_are_stored(tmp_path: Path) -> None:
    # As the weights of an LSTM on a GPU; accelerate 1.15 writes the first part only.
    memory = torch.arange(6.0)
    parts = {"all": memory, "a": memory[:2], "b": memory[2:4], "c": memory[4:], "again": memory[2:4]}
    with pytest.warns(EchelonWarning, match="^again share memory"):
        Accelerator().save(parts, tmp_path / "f", safe_serialization=True)
    expected = {"all": [0, 1, 2, 3, 4, 5], "a": [0, 1], "b": [2, 3], "c": [4, 5]}
    assert {name: value.tolist() for name, value in load_file(tmp_path / "f").items()} == expected


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_is_saved_in_shards_with_an_index(safe: bool, tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(_Tied())
    suffix = "safetensors" if safe else "bin"
    stem = "model" if safe else "pytorch_model"
    (tmp_path / "config.json").touch()
    accelerator.save_model(model, tmp_path, max_shard_size=160, safe_serialization=safe)
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
    # embed.weight has 160 bytes, out.weight 120, out.bias 12
    embed, out = (f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2))
    tied = {} if safe else {"head.weight": embed}
    assert index["weight_map"] == {"embed.weight": embed, "out.weight": out, "out.bias": out} | tied
    assert index["metadata"] == {"total_size": 292}
    parts = [load_state_dict(str(tmp_path / file)) for file in (embed, out)]
    assert torch.equal(parts[0]["embed.weight"], model.embed.weight)
    assert torch.equal(parts[1]["out.weight"], model.out.weight)
    accelerator.save_model(model, tmp_path, safe_serialization=safe)  # nothing that a reader could prefer is left
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["config.json", f"{stem}.{suffix}"])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="exists and is not a directory"):
        accelerator.save_model(model, tmp_path / "file")
    with pytest.raises(UsageError, match="no values on this process, because weight"):
        accelerator.save_model(nn.Linear(1, 1, device="meta"), tmp_path / "m")


def test_the_functions_of_accelerates_module_write_and_read_the_same_files(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    returned = save_accelerator_state(str(tmp_path), [model.state_dict()], [optimizer], [], [], 0, 7)
    assert returned == tmp_path
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "optimizer.bin", "random_states_0.pkl"]
    other = nn.Linear(2, 1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    assert load_accelerator_state(str(tmp_path), [other], [other_optimizer], [], [], 0) == {"step": 7}
    assert torch.equal(model.weight, other.weight)
    assert other_optimizer.state_dict()["state"][0]["momentum_buffer"].tolist() == [[1.0, 1.0]]
    counter, again = _Counter(), _Counter()
    counter.count = 9
    save_custom_state(counter, tmp_path, 2)
    load_custom_state(again, tmp_path, 2)
    assert again.count == 9
    with pytest.raises(UsageError, match="but got 'cuda:7'"):
        load_accelerator_state(str(tmp_path), [other], [], [], [], 0, map_location="cuda:7")
