"""echelon checkpoint and echelon merge-weights, on checkpoints of every layout."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon.checkpoint.stored_weights as merging
from echelon import Accelerator
from echelon.base.errors import CheckpointError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint import storage
from echelon.checkpoint.lock import Owner, _start_of
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import ShardPart
from echelon.checkpoint.save import Content, save
from echelon.cli.main import _run
from echelon.trainer import Trainer
from echelon.utils import merge_fsdp_weights
from echelon.world.world import World
from tests.checkpoint_ranks import no_code_and_no_other_files, on_threads
from tests.harness import run_on_ranks
from tests.trainer_models import Net, arguments, net_data

Echelon = Callable[..., "Result"]


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def echelon(capsys: pytest.CaptureFixture[str]) -> Echelon:
    def run(*argv: object) -> Result:
        code = _run([str(one) for one in argv])
        return Result(code, *capsys.readouterr())

    return run


# ---- a training, by hand and by an Accelerator -----------------------------------------------------------------------


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def _objects() -> tuple[_Tied, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = _Tied()
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    # Not in the order of the model: what is only numbered must be numbered by the groups.
    optimizer = torch.optim.AdamW(
        [{"params": biases, "lr": 0.1}, {"params": others, "weight_decay": 0.3}], amsgrad=True
    )
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


NAMES = ["norm.bias", "head.bias", "embed.weight", "norm.weight"]


class _Counted:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": 3, "mean": torch.arange(2.0), "shape": (1, 2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _train(model: nn.Module, optimizer: Any, schedule: Any, backward: Callable[[torch.Tensor], None]) -> None:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        backward(model(torch.randint(6, (5,), generator=generator)).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def plain() -> tuple[_Tied, torch.optim.Optimizer, Any]:
    objects = _objects()
    _train(*objects, torch.Tensor.backward)
    return objects


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of an Accelerator; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint_3"
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    accelerator.register_for_checkpointing(_Counted())
    model, optimizer, schedule = accelerator.prepare(*_objects())
    _train(model, optimizer, schedule, accelerator.backward)
    random.seed(5)
    accelerator.save_state(str(folder))
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / saved.name)
    return tmp_path / saved.name


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def _same(one: Any, other: Any) -> bool:
    """Compare nested data: tensors and arrays by their bits, everything else with its type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


# ---- ls, verify, show ------------------------------------------------------------------------------------------------


def test_ls_lists_the_newest_first_and_leftovers(echelon: Echelon, saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for number in (2, 10):
        shutil.copytree(saved, root / f"checkpoint_{number}")
    shutil.copytree(saved, root / "checkpoint_11.old-0123456789abcdef")  # a crash between two renames
    (root / "checkpoint_12.tmp-0123456789abcdef").mkdir()
    (root / "checkpoint_13").mkdir()
    os.truncate(root / "checkpoint_2" / "objects.json", 5)
    _flip(root / "checkpoint_10" / "rank_00000.safetensors")
    found = echelon("checkpoint", "ls", tmp_path)
    rows = {line.split()[0]: line for line in found.out.splitlines()}
    assert list(rows) == [
        "name",
        "checkpoint_13",
        "checkpoint_11",
        "checkpoint_10",
        "checkpoint_2",
        "checkpoint_12.tmp-0123456789abcdef",
    ]
    assert "left by an interrupted save" in rows["checkpoint_12.tmp-0123456789abcdef"]
    assert "complete; stored as checkpoint_11.old-0123456789abcdef" in rows["checkpoint_11"]
    assert rows["checkpoint_10"].endswith("complete")
    assert rows["checkpoint_10"].split()[1:3] == ["3", "0"]  # step, epoch
    assert "damaged" in rows["checkpoint_2"]
    assert "objects.json has the wrong size" in rows["checkpoint_2"]
    assert "damaged" in rows["checkpoint_13"]
    assert found.code == 0
    read = echelon("checkpoint", "ls", root, "--verify", "--json")
    states = {entry["name"]: entry["state"] for entry in json.loads(read.out)["entries"]}
    assert states == {
        "checkpoint_13": "damaged",
        "checkpoint_11": "verified",
        "checkpoint_10": "damaged",
        "checkpoint_2": "damaged",
    }
    assert read.code == 1
    assert json.loads(read.out)["leftovers"][0]["name"] == "checkpoint_12.tmp-0123456789abcdef"


def test_ls_names_the_folders_that_contain_checkpoints(
    echelon: Echelon, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert echelon("checkpoint", "ls", tmp_path).out == f"{tmp_path} contains no checkpoints\n"
    for parent in ("out", "second/checkpoints"):
        shutil.copytree(saved, tmp_path / parent / "checkpoint_2")
    (tmp_path / "empty").mkdir()
    folders = f"{tmp_path / 'out'} {tmp_path / 'second'}"
    expected = f"{tmp_path} contains no checkpoints, but these folders do: {folders}\n"
    assert echelon("checkpoint", "ls", tmp_path).out == expected
    monkeypatch.setenv("LANGUAGE", "zh_CN")
    translated = echelon("checkpoint", "ls", tmp_path).out
    assert translated.startswith(f"{tmp_path} 里没有检查点")
    assert translated.endswith(f"{folders}\n")


def test_verify_names_each_damaged_file_and_exits_with_1(echelon: Echelon, copy: Path) -> None:
    whole = echelon("checkpoint", "verify", copy)
    assert (whole.code, whole.err) == (0, "")
    assert "intact: 4 files" in whole.out
    _flip(copy / "rank_00000.safetensors")
    (copy / "rank_00000.json").unlink()
    torn = echelon("checkpoint", "verify", copy)
    assert torn.code == 1
    assert f"{copy}/rank_00000.json is missing" in torn.out
    assert f"{copy}/rank_00000.safetensors is damaged: its checksum does not match the manifest" in torn.out
    assert "objects.json" not in torn.out
    (copy / "manifest.json").unlink()
    assert "is not a checkpoint" in echelon("checkpoint", "verify", copy).out
    assert [entry["problems"] != [] for entry in json.loads(echelon("checkpoint", "verify", copy, "--json").out)] == [
        True
    ]
    wrong = echelon("checkpoint", "verify", copy / "gone")
    assert wrong.code == 2
    assert "does not exist" in wrong.err
    assert "do:" in wrong.err


def test_show_prints_tensors_optimizers_settings_and_progress(echelon: Echelon, saved: Path) -> None:
    shown = json.loads(echelon("checkpoint", "show", saved, "--json").out)
    tensors = {one["name"]: one for one in shown["tensors"]}
    weight = tensors["models.0.embed.weight"]
    assert (weight["dtype"], weight["shape"], weight["num_bytes"], weight["ranks"]) == ("float32", [6, 4], 96, [0])
    assert shown["aliases"] == {"models.0.head.weight": "models.0.embed.weight"}
    assert [(group["params"], group["weight_decay"]) for group in shown["optimizers"][0]] == [(2, 0.01), (2, 0.3)]
    assert shown["config"]["cpu"] == [True, "code Accelerator(cpu=)"]
    assert (shown["progress"]["step"], shown["layout"]) == (3, {"engine": "single", "world_size": 1})
    lines = echelon("checkpoint", "show", saved).out.splitlines()
    assert any(line.split() == ["models.0.embed.weight", "float32", "[6,", "4]", "ranks", "0"] for line in lines)
    assert any(line.split()[:2] == ["cpu", "True"] and "(code Accelerator(cpu=))" in line for line in lines)
    assert "  models.0.head.weight is an alias of models.0.embed.weight" in lines


def test_every_command_shows_one_size_and_show_uses_words(echelon: Echelon, saved: Path) -> None:
    num_bytes = sum(path.stat().st_size for path in saved.iterdir())
    (listed,) = json.loads(echelon("checkpoint", "ls", saved.parent, "--json").out)["entries"]
    shown = json.loads(echelon("checkpoint", "show", saved, "--json").out)
    assert (listed["num_bytes"], shown["num_bytes"]) == (num_bytes, num_bytes)
    size = f"{num_bytes / 1000:.3g} kB"
    texts = [echelon("checkpoint", *argv).out for argv in (("ls", saved.parent), ("show", saved), ("verify", saved))]
    assert all(size in text for text in texts), (size, texts)
    assert re.search(r"^written by  echelon", texts[1], re.MULTILINE)
    assert re.search(r"^progress +step 3, epoch 0$", texts[1], re.MULTILINE)
    assert not re.search("written_by|world_size|_seen|micro_step|None,", texts[1])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("ls", "runs"), 0),
        (("show", "runs"), 0),
        (("verify", "runs"), 0),
        (("ls", "gone"), 2),
        (("show", "gone"), 2),
        (("merge", "gone", "out"), 2),
        (("merge", "runs", "runs"), 2),
        (("export", "gone", "out", "--format", "accelerate"), 2),
        (("import", "gone", "out"), 2),
    ],
)
def test_torch_is_not_imported_to_look_at_a_folder(
    argv: tuple[str, ...], code: int, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "runs" / saved.name)
    program = f"import sys; from echelon.cli.main import _run; code = _run({['checkpoint', *argv]}); assert 'torch' not in sys.modules; sys.exit(code)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert found.returncode == code, found.stdout + found.stderr


def _train_to_the_middle_of_epoch_1(level: str, parity: str, folder: str) -> None:
    """Save 64 samples' second epoch after 32 samples: half of it, in 4 batches of each of two ranks without parity."""
    if level == "trainer":
        settings = {"max_steps": 6, "save_steps": 6, "gradient_accumulation_steps": 2, "parity": parity}
        options = arguments(Path(folder), per_device_train_batch_size=4, save_strategy="steps", **settings)
        Trainer(Net(), options, train_dataset=net_data(64)).train()
        return
    accelerator = Accelerator(cpu=True, parity=parity)
    model = nn.Linear(1, 1)
    # In exact modes the batch size is that of all ranks.
    data = DataLoader(TensorDataset(torch.arange(64.0)[:, None]), batch_size=4 if parity == "off" else 8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6), data)
    for epoch in accelerator.epochs(2):
        num_samples = 0
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            num_samples += 8 if parity == "off" else 2 * len(x)
            if epoch == 1 and num_samples == 32:
                accelerator.save_state(folder)
                return


@pytest.mark.sample(2)
@pytest.mark.parametrize("parity", ["off", "exact"])
@pytest.mark.parametrize("level", ["accelerator", "trainer"])
def test_show_tells_the_position_in_the_epoch(
    level: str, parity: str, echelon: Echelon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_on_ranks(_train_to_the_middle_of_epoch_1, level, parity, str(tmp_path / "run"))
    capsys.readouterr()  # what the ranks have printed
    shown = json.loads(echelon("checkpoint", "show", tmp_path / "run", "--json").out)
    progress, batches = shown["progress"], 4 if parity == "off" else None
    assert shown["loaders"] == [{"epoch": 1, "batches": batches, "samples": 32, "num_samples": 64, "trains": True}]
    assert (progress["epoch"], progress["position"]) == (1, 32)
    assert progress["samples_seen"] == (None if parity == "off" else 96)  # only exact modes count them
    text = echelon("checkpoint", "show", tmp_path / "run").out
    how_many = " (4 batches of each rank)" if parity == "off" else ""
    assert f"loader 0: in epoch 1, after 32 of 64 samples{how_many}\n" in text
    assert not re.search("_seen=(0|None)|micro_step", text)


@pytest.mark.filterwarnings("ignore:for_torch was written by torch.distributed.checkpoint")
def test_the_commands_in_the_document_run(
    echelon: Echelon, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md").read_text()
    # Those on URLs run in tests/unit/checkpoint/test_object_store.py.
    (block,) = [one for one in re.findall(r"```console\n(.*?)```", text, re.DOTALL) if "://" not in one]
    commands = [line.removeprefix("$ echelon ").split() for line in block.splitlines()]
    shutil.copytree(saved, tmp_path / "runs" / "checkpoints" / "checkpoint_3")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert echelon(*command).code == 0, command
    told = {words[1] for words in commands if words[0] == "checkpoint"}
    assert told == {"ls", "verify", "show", "merge", "export", "import", "prune", "convert"}


# ---- prune -----------------------------------------------------------------------------------------------------------


def _series(folder: Path, metrics: dict[int, float | None]) -> None:
    for number, metric in metrics.items():
        objects = {"accelerator": {} if metric is None else {"metric": metric}}
        save(folder / f"checkpoint_{number}", Content(objects=objects), world=World.current(cpu=True))


def test_prune_deletes_older_checkpoints_after_asking_and_nothing_else(
    echelon: Echelon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _series(tmp_path, {1: 0.5, 2: 0.1, 3: 0.4, 10: None, 11: 0.9})
    (tmp_path / "checkpoint_1").rename(tmp_path / "mine")  # a name of the user's
    (tmp_path / "checkpoint_3" / "manifest.json").write_text("cut off")
    (tmp_path / "checkpoint_4").mkdir()
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    refused = echelon("checkpoint", "prune", tmp_path, "--keep", 1)
    assert refused.code == 0
    assert "Delete these 2 of 3 checkpoints" in refused.out + refused.err
    assert {path.name for path in tmp_path.iterdir()} == before
    done = echelon("checkpoint", "prune", tmp_path, "--keep", 1, "--best", 1, "--yes")
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == before - {"checkpoint_10"}  # 2 is the best
    assert (
        echelon("checkpoint", "prune", tmp_path, "--keep", 1, "--best", 1, "--greater_is_better", "true", "--yes").code
        == 0
    )
    assert {path.name for path in tmp_path.iterdir()} == before - {"checkpoint_10", "checkpoint_2"}


def test_prune_knows_the_metrics_of_a_trainer_and_stops_during_a_run(echelon: Echelon, tmp_path: Path) -> None:
    _series(tmp_path, {1: None})
    for step, loss in ((100, 0.3), (200, 0.2), (300, 0.4), (400, 0.5)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        log = [{"step": step - 100, "eval_loss": 0.0}, {"step": step, "loss": 9.0}, {"step": step, "eval_loss": loss}]
        state = {"global_step": step, "epoch": 1.0, "log_history": log}
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
        safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
        os.utime(tmp_path / f"checkpoint-{step}", (step, step))
    shutil.rmtree(tmp_path / "checkpoint_1")
    wrong = echelon("checkpoint", "prune", tmp_path, "--keep", 1, "--best", 2, "--metric", "eval_accuracy", "--yes")
    assert "has an evaluation with eval_accuracy" in wrong.err
    command = ("checkpoint", "prune", tmp_path, "--keep", 1, "--best", 2, "--metric", "eval_loss", "--yes")
    parent = os.getppid()
    owner = replace(Owner.current(), pid=parent, started=str(_start_of(parent)))
    (tmp_path / ".lock").write_text(json.dumps(asdict(owner)))
    assert f"process {parent}" in echelon(*command).err
    assert len(list(tmp_path.glob("checkpoint-*"))) == 4
    (tmp_path / ".lock").unlink()
    assert echelon(*command).code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-100", "checkpoint-200", "checkpoint-400"}


# ---- merge -----------------------------------------------------------------------------------------------------------

WHOLE = {
    "cube": torch.randn(7, 6, 4),
    "wide": torch.randn(1, 6, 4, 2),
    "number": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "counts": torch.arange(9),
    "flags": torch.tensor([True, False]),
    "half": torch.randn(5, 3).bfloat16(),
}


def _save_in_parts(folder: Path, tensors: dict[str, torch.Tensor], *, cut: dict[str, int]) -> None:
    """Save with two ranks; the tensors in ``cut`` are cut along that dimension."""

    def run(world: Any, gather: Any) -> None:
        parts: dict[str, Any] = {}
        for name, tensor in tensors.items():
            parts[f"models.0.{name}"] = tensor
            if name in cut:
                dim, length = cut[name], tensor.shape[cut[name]] // 2
                offset = [0] * tensor.ndim
                offset[dim] = world.rank * length
                own = tensor.narrow(dim, world.rank * length, length).contiguous()
                parts[f"models.0.{name}"] = ShardPart(tuple(tensor.shape), tuple(offset), own)
        save(folder, Content(tensors=parts, objects={"any": 1}), world=world, gather=gather)

    on_threads(run, 2)


@pytest.mark.parametrize("block_bytes", [8, 100, 1 << 20])
def test_merge_exports_unsharded_weights_from_any_sharding(
    echelon: Echelon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(merging, "_BLOCK_BYTES", block_bytes)
    whole = {**WHOLE, "tied": WHOLE["number"]}
    _save_in_parts(tmp_path / "c", whole, cut={"cube": 1, "wide": 2})
    with no_code_and_no_other_files(tmp_path):
        done = echelon("checkpoint", "merge", tmp_path / "c", tmp_path / "one")
        assert (done.code, done.err) == (0, "")
        assert echelon("checkpoint", "merge", tmp_path / "c", tmp_path / "some", "--max_shard_size", "0.2KB").code == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    merged = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert merged.keys() == WHOLE.keys()
    assert _same(merged, {name: WHOLE[name] for name in merged})
    with safetensors.safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "tied": "number"}  # as save_model of Accelerate tells it
    index = json.loads((tmp_path / "some" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / "some" / file)[name], WHOLE[name])
    assert index["weight_map"].keys() == WHOLE.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in WHOLE.values())


def test_merge_converts_dtypes_and_rejects_overflow(echelon: Echelon, tmp_path: Path) -> None:
    _save_in_parts(tmp_path / "c", {**WHOLE, "big": torch.tensor([1e5, 1.0])}, cut={})
    assert echelon("checkpoint", "merge", tmp_path / "c", tmp_path / "bf16", "--precision", "bf16").code == 0
    merged = safetensors.torch.load_file(tmp_path / "bf16" / "model.safetensors")
    assert torch.equal(merged["cube"], WHOLE["cube"].bfloat16())
    assert torch.equal(merged["counts"], WHOLE["counts"])
    refused = echelon("checkpoint", "merge", tmp_path / "c", tmp_path / "fp16", "--precision", "fp16")
    assert refused.code == 1
    assert "big has values up to 100000, which F16 cannot represent" in refused.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "c"]  # and nothing half-written is left


@pytest.mark.slow
def test_merge_needs_less_than_200_mb(echelon: Echelon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "sync", lambda handle: None)  # the disk is not what is measured
    # One tensor of 320 MB, cut along its columns: a merge that had it whole in memory would need more.
    _save_in_parts(tmp_path / "c", {"w": torch.zeros(40, 1 << 21)}, cut={"w": 1})
    process, peak, stop = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert echelon("checkpoint", "merge", tmp_path / "c", tmp_path / "out").code == 0
    finally:
        stop.set()
        watcher.join()
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 320e6
    assert 0 < peak[0] - before < 200e6


def test_merge_reads_the_other_layouts(echelon: Echelon, tmp_path: Path) -> None:
    source = tmp_path / "accelerate"
    source.mkdir()
    safetensors.torch.save_file({"w": WHOLE["cube"]}, source / "model.safetensors", metadata={"format": "pt", "v": "w"})
    torch.save({"w": WHOLE["counts"]}, source / "pytorch_model_1.bin")
    two = echelon("checkpoint", "merge", source, tmp_path / "out")
    assert two.code == 2
    assert "contains 2 models" in two.err
    assert "--model" in two.err
    for model, whole in ((0, WHOLE["cube"]), (1, WHOLE["counts"])):
        assert echelon("checkpoint", "merge", source, tmp_path / f"out{model}", "--model", model).code == 0
        assert torch.equal(safetensors.torch.load_file(tmp_path / f"out{model}" / "model.safetensors")["w"], whole)
    with safetensors.safe_open(tmp_path / "out0" / "model.safetensors", framework="pt") as file:
        assert file.metadata()["v"] == "w"


def test_an_existing_output_or_one_inside_the_checkpoint_is_rejected(
    echelon: Echelon, copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for command in (["merge"], ["export", "--format", "accelerate"]):
        there = echelon("checkpoint", *command, copy, tmp_path / "full")
        assert there.code == 2
        assert "full already exists" in there.err
        inside = echelon("checkpoint", *command, copy, copy / "out")
        assert inside.code == 2
        assert "is inside the checkpoint" in inside.err
    inside = echelon("merge-weights", copy, copy / "out", "--remove_checkpoint_dir")
    assert inside.code == 2
    assert echelon("checkpoint", "verify", copy).code == 0


def test_a_damaged_checkpoint_is_not_converted(echelon: Echelon, copy: Path, tmp_path: Path) -> None:
    _flip(copy / "rank_00000.safetensors")
    for command in (["checkpoint", "merge"], ["checkpoint", "export", "--format", "transformers"], ["merge-weights"]):
        done = echelon(*command, copy, tmp_path / "out")
        assert done.code == 1
        assert "rank_00000.safetensors is damaged" in done.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and copy not in path.parents]


@pytest.mark.parametrize("flags", [[], ["--unsafe_serialization"], ["--remove_checkpoint_dir"]])
def test_merge_weights_matches_accelerate(
    echelon: Echelon, copy: Path, tmp_path: Path, flags: list[str], plain: Any
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("an older one")
    (out / "mine").touch()
    if flags:
        assert echelon("merge-weights", copy, out, *flags).code == 0
    else:
        merge_fsdp_weights(str(copy), str(out))
    assert copy.exists() == (flags != ["--remove_checkpoint_dir"])
    expected = dict(plain[0].state_dict())
    if flags == ["--unsafe_serialization"]:
        merged = torch.load(out / "pytorch_model.bin", weights_only=True)
    else:
        merged = safetensors.torch.load_file(out / "model.safetensors")
        del expected["head.weight"]  # tied
    assert _same(merged, {name: expected[name] for name in merged})
    assert merged.keys() == expected.keys()
    assert {path.name for path in out.iterdir()} - {"pytorch_model.bin"} == {"mine", "model.safetensors"}


# ---- export and import -----------------------------------------------------------------------------------------------


def _require_state_of(found: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Compare a file with the state of the plain optimizer."""
    expected = optimizer.state_dict()
    assert _same(found["state"], expected["state"])
    for group, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert _same({k: v for k, v in group.items() if k != "param_names"}, other)
    assert [name for group in found["param_groups"] for name in group["param_names"]] == NAMES


def test_export_for_accelerate_writes_the_states_of_the_plain_objects(
    echelon: Echelon, copy: Path, tmp_path: Path, plain: Any
) -> None:
    model, optimizer, schedule = plain
    (copy / "notes").mkdir()
    (copy / "notes" / "mine.txt").write_text("kept")
    assert echelon("checkpoint", "export", copy, tmp_path / "out", "--format", "accelerate").code == 0
    out = tmp_path / "out"
    weights = safetensors.torch.load_file(out / "model.safetensors")
    assert _same(
        weights, {name: value for name, value in model.state_dict().items() if name != "head.weight"} | weights
    )
    assert weights.keys() == model.state_dict().keys() - {"head.weight"}
    with torch.serialization.safe_globals(
        [np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType]
    ):
        read = {
            path.name: torch.load(path, weights_only=True) for path in out.iterdir() if path.suffix in (".bin", ".pkl")
        }
    _require_state_of(read["optimizer.bin"], optimizer)
    assert _same(read["scheduler.bin"], schedule.state_dict())
    assert _same(read["custom_checkpoint_0.pkl"], _Counted().state)
    random.seed(5)
    assert read["random_states_0.pkl"]["random_state"] == random.getstate()
    assert read["random_states_0.pkl"]["step"] == 0
    assert (out / "notes" / "mine.txt").read_text() == "kept"


def _content(folder: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(folder)
    assert checkpoint.problems() == []
    manifest = checkpoint.manifest
    ranks = [checkpoint.rank_objects(rank) for rank in range(manifest.world_size)]
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    return {"objects": checkpoint.objects(), "ranks": ranks, "progress": manifest.progress, "tensors": tensors}


def _save_two_ranks(folder: Path) -> None:
    """Save what an Accelerator on two ranks would: sharded weights and moments, and states of each rank's own."""
    whole = {"models.0.w": torch.randn(4, 3), "models.1.w": torch.randn(2)}
    whole |= {"optimizers.0.models.0.w.exp_avg": torch.randn(4, 3), "optimizers.0.models.0.w.step": torch.tensor(2.0)}

    def run(world: Any, gather: Any) -> None:
        rank = world.rank
        tensors: dict[str, Any] = dict(whole)
        for name in ("models.0.w", "optimizers.0.models.0.w.exp_avg"):
            tensors[name] = ShardPart((4, 3), (2 * rank, 0), whole[name][2 * rank : 2 * rank + 2])
        random_states = {
            "random_state": random.Random(rank).getstate(),
            "numpy_random_seed": np.random.RandomState(rank).get_state(),
            "torch_manual_seed": torch.Generator().manual_seed(rank).get_state(),
            "torch_cuda_manual_seed": [torch.arange(3, dtype=torch.uint8) + rank],
        }
        position = {
            "iteration": 1,
            "num_given": rank,
            "order": None,
            "inner": {"at": rank},
            "_iterator_finished": False,
        }
        objects = {
            "accelerator": {"step": 5, "num_models": 2},
            "extra_states": [{}, {}],
            "optimizer_groups": [
                [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["models.0.w"]}],
                [{"lr": 0.25, "params": ["models.1.w"]}],
            ],
            "schedulers": [{"last_epoch": 2}],
            "scaler": {"scale": 4.0, "growth_factor": 2.0},
            "orders": [
                {"iteration": 1, "is_within": False, "order": None, "generators": [torch.ones(2)]},
                {"iteration": 0},
            ],
            "custom.0": {"seen": [1, (2, 3)]},
            "of_a_later_version": ("kept", 1),
        }
        content = Content(
            tensors=tensors,
            objects=objects,
            rank_objects={
                "random": random_states,
                "positions": [position, None],
                "pass": {"draws": [rank, None], "random": None},
                **({"optimizer_values": [{"models.0.w": {"eta": 0.5}}, {}]} if rank == 0 else {}),
            },
            progress={"epoch": 2, "step": 7},
        )
        save(folder, content, world=world, gather=gather)

    on_threads(run, 2)


def test_export_and_import_give_the_same_checkpoint(echelon: Echelon, copy: Path, tmp_path: Path) -> None:
    _save_two_ranks(tmp_path / "two")
    for source in (copy, tmp_path / "two"):
        there, back = tmp_path / f"{source.name}.out", tmp_path / f"{source.name}.back"
        with no_code_and_no_other_files(tmp_path):
            assert echelon("checkpoint", "export", source, there, "--format", "accelerate").code == 0
            done = echelon("checkpoint", "import", there, back)
        assert (done.code, done.err) == (0, "")
        before, after = _content(source), _content(back)
        for name in (
            "num_loaders",
            "bits",
        ):  # Accelerate's layout does not tell, and nothing is compared where they are not
            before["objects"]["accelerator"].pop(name, None)
        for key, value in before.items():
            assert _same(after[key], value), key


def test_export_and_import_for_transformers(echelon: Echelon, saved: Path, tmp_path: Path, plain: Any) -> None:
    _model, optimizer, schedule = plain
    refused = echelon("checkpoint", "export", saved, tmp_path / "out", "--format", "transformers")
    assert refused.code == 1
    assert "contains 1 registered objects" in refused.err
    assert "--format accelerate" in refused.err
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)  # the same, and nothing registered
    prepared = accelerator.prepare(*_objects())
    _train(*prepared, accelerator.backward)
    accelerator.save_state(str(tmp_path / "mine"))
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert (
        echelon("checkpoint", "export", tmp_path / "mine", tmp_path / "checkpoint-3", "--format", "transformers").code
        == 0
    )
    out = tmp_path / "checkpoint-3"
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
    ]
    _require_state_of(torch.load(out / "optimizer.pt", weights_only=True), optimizer)
    assert _same(torch.load(out / "scheduler.pt", weights_only=True), schedule.state_dict())
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 3
    assert echelon("checkpoint", "import", out, tmp_path / "back").code == 0
    before, after = _content(tmp_path / "mine"), _content(tmp_path / "back")
    assert _same(after["tensors"], before["tensors"])
    assert after["progress"] == before["progress"]
    assert _same(after["ranks"][0]["random"], before["ranks"][0]["random"])
    assert (tmp_path / "back" / "config.json").exists()
    assert not (tmp_path / "back" / "optimizer.pt").exists()


def _like_accelerate(folder: Path, plain: Any, *, tied: dict[str, str]) -> None:
    """Write the files of accelerate's own save_state."""
    model, optimizer, schedule = plain
    folder.mkdir()
    weights = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt", **tied})
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(schedule.state_dict(), folder / "scheduler.bin")
    states = {"step": 0, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state()}
    torch.save({**states, "torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")


@pytest.mark.parametrize("tied", [{"head.weight": "embed.weight"}, {}], ids=["as accelerate", "as transformers"])
def test_an_imported_checkpoint_of_accelerate_is_resumed(
    echelon: Echelon, tmp_path: Path, plain: Any, tied: dict[str, str]
) -> None:
    _like_accelerate(tmp_path / "c", plain, tied=tied)
    unnamed = echelon("checkpoint", "import", tmp_path / "c", tmp_path / "out")
    assert unnamed.code == 1
    assert "identifies its parameters by number" in unnamed.err
    assert "--parameters FILE" in unnamed.err
    assert "accelerator.load_state" in unnamed.err
    names = tmp_path / "names.txt"
    for wrong, told in (
        (sorted(NAMES), "but the parameter has"),
        (NAMES[1:], "has 4 parameters, but 3 different names were given"),
        (["norm.b", *NAMES[1:]], "no model in"),
    ):
        names.write_text("\n".join(wrong))
        refused = echelon("checkpoint", "import", tmp_path / "c", tmp_path / "out", "--parameters", names)
        assert refused.code == 1
        assert told in refused.err
        assert not (tmp_path / "out").exists()
    names.write_text("\n".join(NAMES) + "\n")
    assert echelon("checkpoint", "import", tmp_path / "c", tmp_path / "out", "--parameters", names).code == 0
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model, optimizer, schedule = accelerator.prepare(*_objects())
    accelerator.load_state(str(tmp_path / "out"))
    assert _same(dict(model.state_dict()), dict(plain[0].state_dict()))
    assert _same(optimizer.state_dict()["state"], plain[1].state_dict()["state"])
    assert schedule.get_last_lr() == plain[2].get_last_lr()


def test_full_states_of_fsdp_name_their_parameters(echelon: Echelon, tmp_path: Path, plain: Any) -> None:
    folder = tmp_path / "c"
    _like_accelerate(folder, plain, tied={})
    (folder / "model.safetensors").unlink()
    torch.save(plain[0].state_dict(), folder / "pytorch_model_fsdp.bin")
    state = plain[1].state_dict()
    for group in state["param_groups"]:
        group["params"] = [NAMES[number] for number in group["params"]]
    state["state"] = {NAMES[number]: entries for number, entries in state["state"].items()}
    torch.save(state, folder / "optimizer.bin")
    assert echelon("checkpoint", "import", folder, tmp_path / "out").code == 0
    tensors = _content(tmp_path / "out")["tensors"]
    for number, name in enumerate(NAMES):
        moment = plain[1].state_dict()["state"][number]["exp_avg"]
        assert torch.equal(tensors[f"optimizers.0.models.0.{name}.exp_avg"], moment)
    assert torch.equal(tensors["models.0.head.weight"], plain[0].head.weight)


# ---- what must not be trusted ----------------------------------------------------------------------------------------


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/echelon-was-run",)


def _bomb(path: Path) -> None:
    torch.save({"state": _Bomb()}, path)


@pytest.fixture
def bombs(tmp_path: Path, plain: Any) -> Iterator[tuple[Path, Path]]:
    _like_accelerate(tmp_path / "c", plain, tied={})
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    yield tmp_path / "c", tmp_path / "names.txt"
    assert not Path("/tmp/echelon-was-run").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"])
def test_code_in_an_imported_file_is_rejected(echelon: Echelon, bombs: tuple[Path, Path], name: str) -> None:
    folder, names = bombs
    _bomb(folder / name)
    with no_code_and_no_other_files(folder.parent):
        done = echelon("checkpoint", "import", folder, folder.parent / "out", "--parameters", names)
    assert done.code == 1
    assert name in done.err
    assert "was not loaded, because it could run code" in done.err


def test_code_in_weights_is_rejected(echelon: Echelon, bombs: tuple[Path, Path]) -> None:
    folder, _ = bombs
    (folder / "model.safetensors").unlink()
    _bomb(folder / "pytorch_model.bin")
    with no_code_and_no_other_files(folder.parent):
        done = echelon("checkpoint", "merge", folder, folder.parent / "out")
    assert done.code == 1
    assert "was not loaded, because it could run code" in done.err


@pytest.mark.parametrize("command", [["merge"], ["import"], ["show"]])
@pytest.mark.parametrize("is_inner", [True, False])
def test_a_dcp_checkpoint_that_runs_code_is_rejected(
    echelon: Echelon, tmp_path: Path, command: list[str], is_inner: bool
) -> None:
    folder = tmp_path / "c"
    inner = folder / "pytorch_model_fsdp_0"
    inner.mkdir(parents=True)
    (inner / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    (inner / "__0_0.distcp").write_bytes(b"x")
    argv = [inner if is_inner else folder, *([] if command == ["show"] else [tmp_path / "out"])]
    with no_code_and_no_other_files(tmp_path):
        done = echelon("checkpoint", *command, *argv)
        assert done.code == 1
        assert "unpickling can run code, and it contains posix.system" in done.err
        if command == ["merge"]:
            with pytest.raises(CheckpointError, match=r"contains posix\.system"):
                merge_fsdp_weights(argv[0], tmp_path / "out")
    assert not Path("/tmp/echelon-was-run").exists()


def test_an_index_with_files_outside_the_folder_is_rejected(echelon: Echelon, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"w": "../secret.safetensors"}}
    (tmp_path / "c" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "c" / "trainer_state.json").write_text("{}")
    done = echelon("checkpoint", "merge", tmp_path / "c", tmp_path / "out")
    assert done.code == 1
    assert "does not list weight files in the same folder" in done.err


def test_unsupported_dtypes_and_states_are_reported(echelon: Echelon, tmp_path: Path) -> None:
    _save_in_parts(tmp_path / "c", {"z": torch.zeros(2, dtype=torch.complex64)}, cut={})
    done = echelon("checkpoint", "merge", tmp_path / "c", tmp_path / "out")
    assert done.code == 1
    assert "models.0.z has dtype complex64" in done.err
    two = tmp_path / "extra"
    save_objects = {"any": 1, "extra_states": [{"note": "text"}]}
    on_threads(
        lambda world, gather: save(
            two, Content(tensors={"models.0.w": torch.ones(2)}, objects=save_objects), world=world, gather=gather
        ),
        1,
    )
    with pytest.warns(EchelonWarning, match="that are not tensors and were not exported: note"):
        assert echelon("checkpoint", "merge", two, tmp_path / "out").code == 0
