"""save_state and load_state in echelon's format: checkpoints move between layouts, and a resumed run matches the plain loop."""

from __future__ import annotations

import errno
import itertools
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint import storage
from echelon.checkpoint.background_save import TooManyFailedSavesError
from echelon.checkpoint.read import Checkpoint
from echelon.utils import DeepSpeedPlugin, ProjectConfiguration
from tests.checkpoint_ranks import no_code_and_no_other_files
from tests.harness import run_on_ranks
from tests.prepared_loop import train_prepared
from tests.ranks.accelerator.test_accelerate_layout import _both
from tests.reference import gaussian, mean_square, train_updates

LAYOUTS = [("single", 1), ("ddp", 2), ("ddp", 3), ("zero1", 2), ("zero1", 3), ("fsdp2", 2), ("fsdp2", 4)]
LAYOUTS += [("fsdp2 stage 2", 3), ("fsdp2 hybrid", 4)]
LARGE = [("ddp", 8), ("zero1", 5), ("fsdp2", 7), ("fsdp2 hybrid", 6), ("fsdp2 stage 2", 8)]


@pytest.fixture(autouse=True)
def own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CHECKPOINT_FORMAT", "echelon")


# ---- any layout to any layout ----------------------------------------------------------------------------------------

Result = tuple[dict[str, torch.Tensor], list[float]]


def _model(seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    model.register_buffer("counts", torch.arange(3))
    return model.to(
        dtype
    ).eval()  # only buffers of BatchNorm, because its statistics would depend on the number of ranks


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.05, amsgrad=True, eps=1e-3)


def _batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return gaussian(840, 5, seed=step).to(dtype)  # 840 is divisible by 1 to 8


def _plain(num_steps: int, dtype: torch.dtype) -> Result:
    model = _model(0, dtype)
    optimizer = _optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    batches = zip(_batch(step, dtype) for step in range(num_steps))
    plain = train_updates(model, lambda x: mean_square(model(x)), batches, optimizer, schedule=schedule)
    return plain.state, schedule.get_last_lr()


def _options(layout: str) -> dict[str, Any]:
    engine, _, kind = layout.partition(" ")
    if engine == "deepspeed":
        zero = {
            "stage": int(kind),
            "stage3_param_persistence_threshold": 0,
        }  # otherwise small parameters would not be sharded
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero})}
    if kind == "stage 2":
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)}
    if kind == "hybrid":
        axes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=dist.get_world_size() // 2)
        return {"engine": engine, "parallelism_config": axes}
    # DDP puts its buckets into another order after its first step, and gloo then adds three ranks in another order: a
    # run that begins anew differs in the last bit for that alone. With this it keeps them as they are.
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if engine in ("ddp", "zero1") else []
    return {"engine": engine, "kwargs_handlers": handlers}


class _Trained:
    """A model, its optimizer and schedule on this layout."""

    def __init__(self, layout: str, seed: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False, **_options(layout))
        model = _model(seed, dtype)
        optimizer = _optimizer(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)

    def train(self, steps: range) -> None:
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        batches = (_batch(step, self.dtype).chunk(world_size)[rank] for step in steps)
        train_prepared(self.accelerator, self.model, self.optimizer, batches, schedule=self.schedule)

    def result(self) -> Result:
        state = self.accelerator.get_state_dict(self.model) or {}
        moments = self.optimizer.full_state_dict() or {"state": {}}
        tensors = {n: t.detach().clone() for n, t in state.items()}
        for number, entries in moments["state"].items():
            tensors |= {f"{number}.{key}": value.clone() for key, value in entries.items()}
        return tensors, self.schedule.get_last_lr()


def save_and_go_on(layout: str, folder: str, dtype: torch.dtype) -> tuple[Result, Result]:
    run = _Trained(layout, seed=0, dtype=dtype)
    run.train(range(3))
    with no_code_and_no_other_files(Path(folder).parent):
        run.accelerator.save_state(folder)
    at_save = run.result()
    run.train(range(3, 6))
    result = run.result()
    run.accelerator.free_memory()
    return at_save, result


def load_and_go_on(layout: str, folder: str, dtype: torch.dtype) -> tuple[Result, Result]:
    run = _Trained(layout, seed=9, dtype=dtype)
    with warnings.catch_warnings(), no_code_and_no_other_files(Path(folder).parent):
        warnings.filterwarnings("ignore", ".*contains RNG states for . process", EchelonWarning)
        run.accelerator.load_state(folder)
    at_load = run.result()
    run.train(range(3, 6))
    result = run.result()
    run.accelerator.free_memory()
    return at_load, result


@dataclass(frozen=True)
class Saved:
    """The checkpoint of a layout in ``folder``, the state at that time, and the state after training continued."""

    layout: tuple[str, int]
    folder: str
    at_save: Any
    gone_on: Any


def save_in(layout: tuple[str, int], folder: str, dtype: torch.dtype) -> Saved:
    (at_save, gone_on), *_ = run_on_ranks(save_and_go_on, layout[0], folder, dtype, world_size=layout[1], timeout=180)
    return Saved(layout, folder, at_save, gone_on)


def check_load(saved: Saved, other: tuple[str, int], dtype: torch.dtype, tolerance: float) -> None:
    """Resume in the layout ``other``, and compare with uninterrupted training and with the plain loop."""
    (at_load, resumed), *_ = run_on_ranks(
        load_and_go_on, other[0], saved.folder, dtype, world_size=other[1], timeout=180
    )
    assert at_load[1] == saved.at_save[1]
    assert at_load[0].keys() == saved.at_save[0].keys()
    assert len(at_load[0]) == 12 + 8 * 4
    for name, tensor in saved.at_save[0].items():
        assert torch.equal(tensor, at_load[0][name]), (saved.layout, other, name)
    if other == saved.layout:
        assert all(torch.equal(tensor, resumed[0][name]) for name, tensor in saved.gone_on[0].items())
    expected = _plain(6, dtype)
    for name, tensor in expected[
        0
    ].items():  # the order of addition over ranks; eps keeps Adam from amplifying the difference
        torch.testing.assert_close(
            resumed[0][name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m: f"{saved.layout} {other}: {m}"
        )
    assert resumed[1] == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "others"),
    [
        (LAYOUTS[1], [LAYOUTS[2], LAYOUTS[3], LAYOUTS[5]]),
        (LAYOUTS[4], [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]]),
        (LAYOUTS[8], [LAYOUTS[5], LAYOUTS[8]]),
        *(pytest.param(layout, LAYOUTS + LARGE, marks=pytest.mark.soak) for layout in LAYOUTS + LARGE),
    ],
)
def test_a_checkpoint_of_any_layout_resumes_in_any_other(
    saved: tuple[str, int], others: list[tuple[str, int]], tmp_path: Path
) -> None:
    whole = save_in(saved, str(tmp_path / "s"), torch.float64)
    for other in others:
        check_load(whole, other, torch.float64, tolerance=1e-12)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stateful", [False, True], ids=["skip", "stateful"])
def test_a_run_stopped_in_mid_epoch_matches_the_plain_loop_bit_for_bit(
    world_size: int, stateful: bool, tmp_path: Path
) -> None:
    for plain, resumed in run_on_ranks(_both, str(tmp_path / "s"), (1, 3), False, stateful, world_size=world_size):
        assert all(map(torch.equal, plain[0], resumed[0]))
        assert plain[1:] == resumed[1:]
    assert (tmp_path / "s" / "manifest.json").exists()


# ---- rejected checkpoints -------------------------------------------------------------------------------------------------


def _saved(folder: Path, **options: Any) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(folder, **options)
    return accelerator


def test_errors_name_different_groups_and_missing_objects(tmp_path: Path) -> None:
    _saved(tmp_path / "s")
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(CheckpointError, match=r"has groups of \[2\] parameters, but this run has groups of \[1, 1\]"):
        accelerator.load_state(tmp_path / "s")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(
        CheckpointError, match=r"contains 1 optimizers, but this run has 0(.|\n)*allow_missing=\('optimizer\[0\]',\)"
    ):
        accelerator.load_state(tmp_path / "s")
    accelerator.load_state(tmp_path / "s", allow_missing=["optimizer"])


def _momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters() if p.requires_grad}


def test_optimizer_state_follows_parameter_names_and_ignores_frozen_parameters(
    tmp_path: Path,
) -> None:
    def make(order: list[str], *groups_of: bool) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        named = dict(model.named_parameters())
        groups = [{"params": [named[name] for name in order]}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        return accelerator, model, optimizer

    accelerator, model, optimizer = make(["0.weight", "0.bias", "1.weight", "1.bias"])
    accelerator.backward(model(torch.tensor([[1.0, 3.0]])).square().sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "s")
    expected = {name: value.clone() for name, value in _momenta(model, optimizer).items()}
    assert not torch.equal(expected["1.weight"][0], expected["1.weight"][1])
    accelerator, other, optimizer = make(["1.bias", "1.weight"])
    accelerator.load_state(tmp_path / "s")
    found = _momenta(other, optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    accelerator, _, _ = make(["1.bias"])
    with pytest.raises(CheckpointError, match=r"they differ in models.0.1.weight"):
        accelerator.load_state(tmp_path / "s")


def test_a_missing_object_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    seeds = itertools.count()

    def make(*more: str) -> tuple[Accelerator, nn.Module]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(next(seeds))  # loading restores the RNG state of the saved run
        model = nn.ModuleDict({"body": nn.Linear(2, 1), **({"head": nn.Linear(1, 1)} if "head" in more else {})})
        optimizer = torch.optim.SGD(model["body"].parameters(), lr=0.1)
        accelerator.prepare(model, optimizer)
        if "scheduler" in more:
            accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 5))
        if "loader" in more:
            accelerator.prepare(torch.utils.data.DataLoader(range(4)))  # type: ignore[arg-type]
        return accelerator, model

    make()[0].save_state(tmp_path / "small")
    everything = make("head", "scheduler", "loader")
    everything[0].save_state(tmp_path / "large")
    for saved, here, allowed, why in [
        ("small", ["scheduler"], "scheduler[0]", "contains 0 schedulers, but this run has 1"),
        ("small", ["loader"], "loader", "contains 0 loaders, but this run has 1"),
        ("small", ["head"], "model[0].head", "a different model than this ModuleDict: missing head"),
        ("large", ["head", "loader"], "scheduler", "contains 1 schedulers, but this run has 0"),
        ("large", ["scheduler"], "model", "unexpected head.bias, head.weight"),
    ]:
        accelerator, model = make(*here)
        weight = Checkpoint(tmp_path / saved).read("models.0.body.weight")
        with pytest.raises(CheckpointError, match=f"{why}(.|\n)*allow"):
            accelerator.load_state(tmp_path / saved)
        assert not torch.equal(model["body"].weight, weight)  # type: ignore[index]
        accelerator.load_state(tmp_path / saved, allow_missing=(allowed,))
        assert torch.equal(model["body"].weight, weight)  # type: ignore[index]
    with pytest.raises(UsageError, match="'shedulers' is not a checkpoint entry name"):
        everything[0].load_state(tmp_path / "large", allow_missing=("shedulers",))


def _wide(num: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(num)))


@pytest.mark.parametrize("kind", ["echelon", "accelerate"])
@pytest.mark.parametrize(
    ("saved", "here", "why"),
    [
        (
            8,
            nn.Linear(2, 2),
            r"missing weight, bias; unexpected 0.bias, 0.weight, 1.bias, 1.weight, 2.bias and 11 more",
        ),
        (
            1,
            nn.Sequential(nn.Linear(3, 2)),
            r"different shape 0.weight: \[2, 2\] in the checkpoint, \[2, 3\] in the model",
        ),
        (1, _wide(2), "missing 1.weight, 1.bias"),
        (1, nn.Sequential(nn.Linear(2, 2, bias=False)), "unexpected 0.bias"),
    ],
)
def test_the_error_for_another_model_names_the_model_not_the_optimizer(
    kind: Any, saved: int, here: nn.Module, why: str, tmp_path: Path
) -> None:
    def prepare(model: nn.Module) -> Accelerator:
        project = ProjectConfiguration(tmp_path, checkpoint_format=kind)
        accelerator = Accelerator(cpu=True, project_config=project)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        return accelerator

    original = _wide(saved)
    prepare(original).save_state(tmp_path / "s")
    other = prepare(here)
    before = [p.detach().clone() for p in here.parameters()]
    for load in (other.load_state, other.resume):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / "s")
        text = str(caught.value)
        assert (
            f"s belongs to a different model than this {type(here).__name__}: " in text
            or "model.safetensors belongs to" in text
        )
        assert re.search(why, text)
        assert "optimizer" not in text
    assert all(map(torch.equal, before, here.parameters()))
    if why == "unexpected 0.bias":
        other = Accelerator(cpu=True, project_config=ProjectConfiguration(checkpoint_format=kind))
        other.prepare(here)
        other.load_state(
            tmp_path / "s", strict=False, **({"allow_missing": ["optimizer"]} if kind == "echelon" else {})
        )
        assert torch.equal(here[0].weight, original[0].weight)  # type: ignore[index]


class _WithExtra(nn.Linear):
    """A module whose state dict contains more than its tensors."""

    secret = 1

    def get_extra_state(self) -> Any:
        return {"secret": self.secret, 5: (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        assert state[5] == (1, 2)
        self.secret = state["secret"]


def test_a_state_dict_with_more_than_tensors_is_restored(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = _WithExtra(2, 1)
    accelerator.prepare(model)
    model.secret = 7
    accelerator.save_state(tmp_path / "s")
    weight = model.weight.detach().clone()
    model.secret = 1
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "s")
    assert (model.secret, torch.equal(model.weight, weight)) == (7, True)


class _Holds:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_registered_objects_are_restored_and_unsupported_ones_are_rejected(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(
        UsageError, match=r"the state of _Holds\['value'\]\[1\] is a builtins.object, which is not plain"
    ):
        accelerator.register_for_checkpointing(_Holds([1, object()]))
    values = [{1: (2, torch.arange(3))}, Path("a")]
    holders = [_Holds(value) for value in values]
    accelerator.register_for_checkpointing(*holders)
    accelerator.save_state(tmp_path / "s")
    for holder in holders:
        holder.value = None
    accelerator.load_state(tmp_path / "s")
    assert holders[0].value[1][0] == 2
    assert torch.equal(holders[0].value[1][1], torch.arange(3))
    assert holders[1].value == Path("a")
    accelerator.register_for_checkpointing(_Holds(1))
    with pytest.raises(CheckpointError, match="contains 2 objects registered for checkpointing, but this run has 3"):
        accelerator.load_state(tmp_path / "s")


def test_argument_and_environment_select_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(**options: Any) -> set[str]:
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(**options))
        accelerator.prepare(nn.Linear(1, 1))
        return {path.name for path in accelerator.save_state(tmp_path / "s").iterdir()}

    own = {"manifest.json", "objects.json", "rank_00000.safetensors", "rank_00000.json"}
    theirs = {"model.safetensors", "random_states_0.pkl"}
    assert files() == own
    assert files(checkpoint_format="accelerate") == theirs  # no files of the other layout remain
    monkeypatch.setenv("ECHELON_CHECKPOINT_FORMAT", "accelerate")
    assert files() == theirs
    assert files(checkpoint_format="echelon") == own
    with pytest.raises(UsageError, match="checkpoint_format must be 'echelon' or 'accelerate', but got 'pickle'"):
        files(checkpoint_format="pickle")
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match="requires echelon's own checkpoint format"):
        accelerator.save_state(tmp_path / "s", blocking=False)


@pytest.mark.parametrize("kind", ["echelon", "accelerate"])
def test_hooks_exclude_models_that_they_save_and_load(kind: Any, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(checkpoint_format=kind))
    one, two = accelerator.prepare(nn.Linear(1, 1), nn.Linear(2, 1))

    def save_second(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        assert models == [one, two]
        assert Path(output_dir) != tmp_path / "s"  # a failure from here on leaves nothing there
        torch.save(weights.pop()["weight"], os.path.join(output_dir, "mine.pt"))

    def load_second(models: list[nn.Module], input_dir: str) -> None:
        weight = torch.load(os.path.join(input_dir, "mine.pt"))
        with torch.no_grad():
            models.pop().weight.copy_(weight)  # type: ignore[operator,union-attr]

    def models_in(folder: Path) -> set[str]:
        if kind == "accelerate":
            return {path.name for path in folder.glob("model*")}
        return {name.rpartition(".")[0] for name in Checkpoint(folder).names() if name.startswith("models")}

    first, both = {
        "echelon": ({"models.0"}, {"models.0", "models.1"}),
        "accelerate": ({"model.safetensors"}, {"model.safetensors", "model_1.safetensors"}),
    }[kind]
    handles = (
        accelerator.register_save_state_pre_hook(save_second),
        accelerator.register_load_state_pre_hook(load_second),
    )
    folder = accelerator.save_state(tmp_path / "s")
    assert (folder / "mine.pt").exists()
    assert models_in(folder) == first
    saved = one.weight.tolist(), two.weight.tolist()
    with torch.no_grad():
        one.weight.zero_()
        two.weight.zero_()
    accelerator.load_state(folder)
    assert (one.weight.tolist(), two.weight.tolist()) == saved
    for handle in handles:
        handle.remove()
    assert models_in(accelerator.save_state(tmp_path / "t")) == both
    accelerator.load_state(tmp_path / "t")


class _Average:
    """A registered object that a save hook changes, as an EMA of weights that is synchronized before it is saved."""

    def __init__(self) -> None:
        self.values = [0.0]

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def _draws_after_resume(kind: Any, folder: str) -> tuple[list[float], list[float], list[float]]:
    accelerator = Accelerator(cpu=True, seed=3, project_config=ProjectConfiguration(checkpoint_format=kind))
    accelerator.prepare(nn.Linear(1, 1))
    average = _Average()
    accelerator.register_for_checkpointing(average)

    def draw(_models: Any, _weights: Any, _folder: str) -> None:
        average.values = torch.rand(3, dtype=torch.float64).tolist()

    accelerator.register_save_state_pre_hook(draw)
    accelerator.save_state(folder)
    saved, average.values = average.values, []
    going_on = torch.rand(3).tolist()
    accelerator.load_state(folder)
    assert average.values == saved
    return going_on, torch.rand(3).tolist(), saved


@pytest.mark.parametrize("kind", ["echelon", "accelerate"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_states_are_saved_as_hooks_leave_them(kind: Any, world_size: int, tmp_path: Path) -> None:
    """A resumed run draws the same random numbers as the run that saved, although a hook drew some, too."""
    for going_on, resumed, _ in run_on_ranks(_draws_after_resume, kind, str(tmp_path / "s"), world_size=world_size):
        assert resumed == going_on


# ---- numbered checkpoints, failures, the background -------------------------------------------------------------------


def _project(folder: Path, **options: Any) -> ProjectConfiguration:
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **options)


def test_the_newest_complete_checkpoint_is_loaded_and_skipped_ones_are_reported(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=_project(tmp_path, total_limit=2))
    model = accelerator.prepare(nn.Linear(1, 1))
    folders = []
    (tmp_path / "checkpoints" / f"checkpoint_7.tmp-{'0' * 16}").mkdir(parents=True)  # left by a killed run
    for step in range(3):
        with torch.no_grad():
            model.weight.fill_(step)
        folders.append(accelerator.save_state(blocking=step == 0))
    accelerator.load_state()
    assert model.weight.item() == 2
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [".lock", "checkpoint_1", "checkpoint_2"]
    data = bytearray((folders[2] / "rank_00000.safetensors").read_bytes())
    data[-1] ^= 1
    (folders[2] / "rank_00000.safetensors").write_bytes(data)
    with pytest.warns(
        EchelonWarning, match=r"loading .*checkpoint_1;.*\n.*checkpoint_2: .*rank_00000.safetensors is damaged"
    ):
        accelerator.load_state()
    assert model.weight.item() == 1
    (folders[1] / "manifest.json").unlink()
    for load in (accelerator.load_state, accelerator.resume):  # not a new run
        with pytest.raises(CheckpointError, match=r"contains no complete checkpoint\n.*checkpoint_2.*\n.*checkpoint_1"):
            load()


@pytest.mark.parametrize("blocking", [True, False])
def test_the_best_and_every_nth_checkpoint_are_kept(blocking: bool, tmp_path: Path) -> None:
    options = {"total_limit": 2, "keep_best": 1, "keep_every": 4}
    accelerator = Accelerator(cpu=True, project_config=_project(tmp_path, **options))
    accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.best_checkpoint is None
    kept = []
    losses = [0.5, 0.3, 0.4, float("nan"), 0.9, None]
    for loss in losses:
        accelerator.save_state(metric=loss, blocking=blocking)
        accelerator.checkpoints.store.wait()
        kept.append(sorted(int(p.name[11:]) for p in (tmp_path / "checkpoints").glob("checkpoint_*")))
    # 0 and 4 are multiples of 4, and 1 is the best. The newest is kept, and at most 2 others count.
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [0, 1, 4, 5]]
    best = accelerator.best_checkpoint
    assert best is not None
    assert best.name == "checkpoint_1"
    again = Accelerator(cpu=True, project_config=_project(tmp_path, greater_is_better=True, **options))
    again.prepare(nn.Linear(1, 1))
    best = again.best_checkpoint  # metrics of earlier starts of the run are considered
    assert best is not None
    assert best.name == "checkpoint_4"
    with pytest.raises(UsageError, match="keep_every=0 is below 1"):
        _project(tmp_path, keep_every=0)


def test_a_full_disk_is_reported_and_the_third_failure_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True, project_config=_project(tmp_path))
    accelerator.prepare(nn.Linear(1, 1))
    kept = accelerator.save_state()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "write", full)
    for _ in range(2):
        accelerator.save_state(blocking=False)
        with pytest.warns(EchelonWarning, match="No space left on device"):
            accelerator.checkpoints.store.wait()
    accelerator.save_state(blocking=False)
    with pytest.raises(TooManyFailedSavesError, match="3 consecutive checkpoints could not be written"):
        accelerator.checkpoints.store.wait()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name != ".lock"] == [kept.name]


def _in_background(folder: str) -> tuple[float, float]:
    accelerator = Accelerator(engine="fsdp2", cpu=True, project_config=_project(Path(folder), total_limit=1))
    model = nn.Linear(3, 5)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    x = torch.ones(2, 3)
    for _ in range(4):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(blocking=False)
    state = accelerator.get_state_dict(model)
    before = float(sum(t.sum() for t in state.values())) if state else 0.0
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    accelerator.load_state()
    state = accelerator.get_state_dict(model)
    dist.barrier()
    return before, float(sum(t.sum() for t in state.values())) if state else 0.0


def test_ranks_save_in_the_background_and_keep_one_checkpoint(tmp_path: Path) -> None:
    for before, after in run_on_ranks(_in_background, str(tmp_path)):
        assert before == after
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [".lock", "checkpoint_3"]


class _WithBuffers(nn.Module):
    """Buffers of which each rank has other values; two that are large, which would be on different ranks if they were distributed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for name, size in (("small", 3), ("large", 2**15), ("other", 2**15)):  # the latter have 128 KiB
            self.register_buffer(name, torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x)
        return output


def save_buffers(engine: str, folder: str) -> dict[str, float]:
    accelerator = Accelerator(cpu=True, engine=engine)
    model = _WithBuffers()
    optimizer: Any
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.linear.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    inner = accelerator.unwrap_model(model)
    for buffer in inner.buffers():
        buffer.fill_(7.0 + accelerator.process_index)
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    found = {name: float(buffer.mean()) for name, buffer in inner.named_buffers()}
    accelerator.free_memory()
    return found


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_a_checkpoint_holds_the_buffers_of_rank_zero_whatever_their_size(engine: str, tmp_path: Path) -> None:
    assert (
        run_on_ranks(save_buffers, engine, str(tmp_path / "saved"))
        == [dict.fromkeys(("small", "large", "other"), 7.0)] * 2
    )
