"""Checkpoints of models whose layers are split: saved on one mesh, loaded on another; export, and weights straight into the parts."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echelon import Accelerator, ParallelismConfig
from echelon.base.warnings import EchelonWarning
from echelon.utils import TorchTensorParallelConfig, load_checkpoint_in_model
from tests.harness import run_on_ranks
from tests.parallel_models import mean_loss, new_optimizer, num_tokens, ragged_batches, tiny_gpt, tiny_llama
from tests.ranks.engines.test_tensor_parallel import GPT_PLAN, largest_difference

_LAYOUTS: dict[str, dict[str, int]] = {
    "1": {},
    "tp 2": {"tp_size": 2},
    "tp 4": {"tp_size": 4},
    "replicate 2 x tp 2": {"dp_replicate_size": 2, "tp_size": 2},
    "shard 2 x tp 2": {"dp_shard_size": 2, "tp_size": 2},
    "shard 4": {"dp_shard_size": 4},
    "replicate 2 x shard 2": {"dp_replicate_size": 2, "dp_shard_size": 2},
}
_ORDINARY = {
    ("1", "tp 2"),
    ("shard 2 x tp 2", "shard 4"),
    ("replicate 2 x shard 2", "replicate 2 x tp 2"),
}
_PAIRS = [
    pytest.param(saved, loaded, marks=() if (saved, loaded) in _ORDINARY else pytest.mark.soak)
    for saved in _LAYOUTS
    for loaded in _LAYOUTS
    if saved != loaded
]


def _prepared(layout: str, *, lr: float = 1e-2) -> tuple[Accelerator, Any, Any]:
    sizes = _LAYOUTS[layout]
    handler = TorchTensorParallelConfig(plan=GPT_PLAN)
    config = ParallelismConfig(**sizes, tp_handler=handler) if sizes else None
    accelerator = Accelerator(cpu=True, parity="exact", parallelism_config=config)
    model: Any = tiny_gpt(tied=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + lr)
    model, optimizer = accelerator.prepare(model, new_optimizer(model))
    return accelerator, model, optimizer


def _state(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the whole weights and optimizer state on rank zero, each entry a tensor."""
    weights = accelerator.get_state_dict(model)
    state = accelerator.session.engine.full_optimizer_state(optimizer.optimizer)
    if not accelerator.is_main_process or weights is None or state is None:
        return {}
    found = {f"weight {name}": value.clone() for name, value in weights.items()}
    for number, entries in state["state"].items():
        found.update({f"{key} {number}": value.clone() for key, value in entries.items()})
    return found


def _saved(layout: str, folder: str) -> dict[str, Any]:
    accelerator, model, optimizer = _prepared(layout)
    for batch in ragged_batches(2):
        accelerator.backward(mean_loss(model, batch), num_items=num_tokens(batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    return _state(accelerator, model, optimizer)


def _loaded(layout: str, folder: str) -> dict[str, Any]:
    accelerator, model, optimizer = _prepared(layout, lr=0.5)
    with warnings.catch_warnings():  # expected where more ranks read samples than before
        warnings.filterwarnings("ignore", message=".*contains RNG states for", category=EchelonWarning)
        accelerator.load_state(folder)
    return _state(accelerator, model, optimizer)


@pytest.fixture(scope="module")
def saved_states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Checkpoints by layout, made when they are first asked for."""

    class _States(dict[str, Any]):
        def __missing__(self, layout: str) -> tuple[Path, dict[str, Any]]:
            folder = tmp_path_factory.mktemp("saved") / "state"
            self[layout] = folder, run_on_ranks(_saved, layout, str(folder), world_size=_num_ranks(layout))[0]
            return self[layout]

    return _States()


def _num_ranks(layout: str) -> int:
    return math.prod(_LAYOUTS[layout].values())


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), _PAIRS)
def test_a_checkpoint_loads_on_another_mesh(saved: str, loaded: str, saved_states: Any) -> None:
    folder, expected = saved_states[saved]
    found = run_on_ranks(_loaded, loaded, str(folder), world_size=_num_ranks(loaded))[0]
    assert set(found) == set(expected)
    assert len(found) > 50
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def _exported(folder: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))
    model = accelerator.prepare(tiny_llama(tied=True))
    accelerator.save_model(model, folder)
    return {}


@pytest.mark.slow
def test_the_export_is_what_one_process_writes(tmp_path: Path) -> None:
    run_on_ranks(_exported, str(tmp_path / "ranks"), world_size=4)
    model = tiny_llama(tied=True)
    Accelerator(cpu=True).save_model(model, tmp_path / "one")
    found, expected = (load_file(tmp_path / where / "model.safetensors") for where in ("ranks", "one"))
    assert {name: value.tolist() for name, value in found.items()} == {n: v.tolist() for n, v in expected.items()}


def _filled_from_files(folder: str) -> tuple[dict[str, Any], int]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))
    with torch.device("meta"):
        model = tiny_llama()
    model = accelerator.prepare(model)
    load_checkpoint_in_model(model, folder)
    held = sum(p.to_local().numel() for name, p in model.named_parameters() if "proj" in name)
    return accelerator.get_state_dict(model) or {}, held


def test_weights_go_from_files_into_the_parts(tmp_path: Path) -> None:
    model = tiny_llama()
    Accelerator(cpu=True).save_model(model, tmp_path)
    answers = run_on_ranks(_filled_from_files, str(tmp_path), world_size=4)
    assert largest_difference(answers[0][0], dict(model.state_dict()), relative=False) == 0
    whole = sum(p.numel() for name, p in model.named_parameters() if "proj" in name)
    assert [held for _, held in answers] == [whole // 4] * 4
