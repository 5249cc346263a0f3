"""Checkpoints that torch.distributed.checkpoint wrote from FSDP2, with the names that other programs give: they load on any layout.

The reference is what torch reads from them, in one process without FSDP.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from echelon import Accelerator
from echelon.base.errors import CheckpointError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint.formats.dcp import open_dcp
from echelon.cli.checkpoint import command
from echelon.distributed.setup import cleanup
from tests.harness import import_ahead, run_on_ranks
from tests.prepared_loop import all_warnings, whole

import_ahead("torch.distributed.fsdp", "torch.distributed.checkpoint")

_PROGRAMS = ("torch", "torchtitan", "accelerate", "lightning")


def _model() -> nn.Module:
    """Sizes that four ranks do not share evenly: some have no row of the last layer."""
    model = nn.Sequential(nn.Linear(5, 13), nn.BatchNorm1d(13), nn.Tanh(), nn.Linear(13, 3))
    model[0].bias.requires_grad_(False)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )


def _step(model: nn.Module, optimizer: Any) -> None:
    torch.manual_seed(1)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _write(folder: str, program: str) -> None:
    """Train with FSDP2 and save as ``program`` does."""
    torch.manual_seed(0)
    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = _optimizer(model)
    for _ in range(2):
        _step(model, optimizer)
    weights = get_model_state_dict(model)
    if program == "torchtitan":
        flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        state = {**weights, "optimizer": flat, "train_state": {"step": torch.tensor(2)}}
        dcp.save(state, checkpoint_id=folder)
        return
    state = get_optimizer_state_dict(model, optimizer)
    if program == "accelerate":
        dcp.save({"model": weights}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
        dcp.save({"optimizer": state}, checkpoint_id=f"{folder}/optimizer_0")
    elif program == "lightning":
        dcp.save({"state_dict": weights, "optimizer_0": state}, checkpoint_id=folder)
    else:
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def _reference(folder: Path, program: str, to: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights, and the optimizer's state by ``<parameter>.<key>``, as torch reads them."""

    def read(path: Path) -> dict[str, Any]:
        dcp_to_torch_save(path, to)
        found: dict[str, Any] = torch.load(to, weights_only=False)
        return found

    if program == "accelerate":
        whole_state = {**read(folder / "pytorch_model_fsdp_0"), **read(folder / "optimizer_0")}
    else:
        whole_state = read(folder)
    weights = whole_state.get("model") or whole_state.get("state_dict")
    optimizer = next(value for key, value in whole_state.items() if key.startswith("optim"))
    if program == "torchtitan":
        weights = {name: value for name, value in whole_state.items() if isinstance(value, torch.Tensor)}
        state = {k.removeprefix("state."): v for k, v in optimizer.items() if k.startswith("state.")}
    else:
        state = {f"{name}.{key}": v for name, own in optimizer["state"].items() for key, v in own.items()}
    return weights, state


def _load(folder: str, engine: str, *, resumes: bool) -> tuple[dict[str, Any], dict[str, Any], list[Any], list[str]]:
    """Load into other weights; return the whole state and the learning rate and weight decay of each group."""
    accelerator = Accelerator(cpu=True, engine=engine)
    torch.manual_seed(5)
    bare = _model()
    prepared, optimizer = accelerator.prepare(bare, _optimizer(bare))
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    with all_warnings() as caught:
        if resumes:
            assert accelerator.resume(folder, must_exist=True)
        else:
            accelerator.load_state(folder)
    names = {id(p): name for name, p in bare.named_parameters()}
    state = {
        f"{names[id(p)]}.{key}": value
        for group in optimizer.param_groups
        for p in group["params"]
        for key, value in optimizer.state[p].items()
    }
    found = (_full(accelerator.unwrap_model(prepared).state_dict()), _full(state))
    groups = [[group["lr"], group["weight_decay"]] for group in optimizer.param_groups]
    _step(prepared, optimizer)  # the state is usable
    assert all(whole(value).isfinite().all() for value in prepared.parameters())
    cleanup()
    return *found, groups, [str(one.message) for one in caught]


def _full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in state.items()}


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("program", "num_writers", "engine", "num_readers"),
    [
        ("torch", 4, "ddp", 1),
        ("torchtitan", 2, "fsdp2", 4),
        ("accelerate", 4, "fsdp2", 2),
        ("lightning", 2, "ddp", 2),
    ],
)
def test_what_torch_wrote_loads_on_any_layout(
    program: str, num_writers: int, engine: str, num_readers: int, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    run_on_ranks(_write, str(folder), program, world_size=num_writers)
    weights, state = _reference(folder, program, tmp_path / "reference.pt")
    assert len(state) == 5 * 3
    results = run_on_ranks(
        _load, str(folder), engine, resumes=program != "torch", world_size=num_readers, init_group=False
    )
    for rank, (loaded, loaded_state, groups, warned) in enumerate(results):
        assert _same(loaded, weights)
        assert _same(loaded_state, state)
        assert groups == [[0.01, 0.1], [0.01, 0.0]]
        if rank == 0:
            (no_random, *others) = [text for text in warned if "holds no RNG" in text or "train_state" in text]
            assert "no RNG states and no positions in the data" in no_random
            assert ["train_state" in text for text in others] == ([True] if program == "torchtitan" else [])


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("program", _PROGRAMS)
def test_it_is_converted_and_written_back_for_torch(program: str, tmp_path: Path) -> None:
    """DCP -> echelon -> DCP: plain torch.distributed.checkpoint loads equal weights and optimizer state into a model of its own."""
    folder, own, back = tmp_path / "c", tmp_path / "own", tmp_path / "back"
    run_on_ranks(_write, str(folder), program, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        command.main(["convert", str(folder), str(own)], standalone_mode=False)
    command.main(["convert", str(own), str(back), "--format", "dcp"], standalone_mode=False)
    weights, state = _reference(folder, program, tmp_path / "reference.pt")
    model = _model()
    optimizer = _optimizer(model)
    wanted = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(wanted, checkpoint_id=back, no_dist=True)
    assert _same(wanted["model"], weights)
    loaded = wanted["optimizer"]
    assert _same({f"{n}.{k}": v for n, entries in loaded["state"].items() for k, v in entries.items()}, state)
    assert [[group["lr"], group["weight_decay"]] for group in loaded["param_groups"]] == [[0.01, 0.1], [0.01, 0.0]]
    assert _same(
        {
            n.removeprefix("models.0."): open_dcp(back).read(n)
            for n in open_dcp(back).names()
            if n.startswith("models.")
        },
        weights,
    )


def _load_into_another_model(folder: str) -> str:
    accelerator = Accelerator(cpu=True, engine="fsdp2")
    bare = nn.Sequential(nn.Linear(5, 12), nn.Linear(12, 3))
    accelerator.prepare(bare, torch.optim.AdamW(bare.parameters()))
    before = [whole(value) for value in bare.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        with pytest.raises(CheckpointError) as error:
            accelerator.load_state(folder)
    assert all(map(torch.equal, before, [whole(value) for value in bare.parameters()]))
    cleanup()
    return str(error.value)


def test_that_of_another_model_is_rejected(tmp_path: Path) -> None:
    run_on_ranks(_write, str(tmp_path / "c"), "torch", world_size=2)
    for text in run_on_ranks(_load_into_another_model, str(tmp_path / "c"), world_size=2, init_group=False):
        assert "0.weight" in text
