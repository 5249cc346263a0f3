"""A checkpoint of any mesh loads on any other one: 16 x 16 layouts, with equal bits of weights and optimizer state."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from echelon import Accelerator, ParallelismConfig
from echelon.base.warnings import EchelonWarning
from tests.harness import import_ahead, run_on_ranks
from tests.parallel_models import (
    CLIP,
    IGNORED,
    mean_loss,
    new_optimizer,
    num_tokens,
    plain_updates,
    ragged_batches,
    tiny_llama,
)
from tests.prepared_loop import whole
from tests.reference import saved_weights

import_ahead("transformers.models.llama.modeling_llama", "torch.distributed.pipelining")

_LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "replicate 2": {"dp_replicate_size": 2},
    "shard 2": {"dp_shard_size": 2},
    "shard 4": {"dp_shard_size": 4},
    "replicate 2 x shard 2": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "tp 2": {"tp_size": 2},
    "tp 4": {"tp_size": 4},
    "replicate 2 x tp 2": {"dp_replicate_size": 2, "tp_size": 2},
    "shard 2 x tp 2": {"dp_shard_size": 2, "tp_size": 2},
    "cp 2": {"cp_size": 2},
    "shard 2 x cp 2": {"dp_shard_size": 2, "cp_size": 2},
    "sp 2 x tp 2": {"sp_size": 2, "tp_size": 2},
    "pp 2": {"pp_size": 2},
    "pp 4": {"pp_size": 4},
    "pp 2 x shard 2": {"pp_size": 2, "dp_shard_size": 2},
    "pp 2 x tp 2": {"pp_size": 2, "tp_size": 2},
}


def _loader() -> DataLoader[Any]:
    rows = [{k: v[i] for k, v in batch.items()} for batch in ragged_batches(2, batch_size=8) for i in range(8)]
    return DataLoader(rows, batch_size=8)  # type: ignore[arg-type]


def _count(batch: Any) -> float:
    return float(num_tokens(batch["labels"]))


def _loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    labels = batch["labels"].flatten()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total / max(1.0, _count(batch))


def _prepared(sizes: dict[str, int], factor: float = 1.0, accumulation: int = 1) -> tuple[Accelerator, Any, Any, Any]:
    """Return an Accelerator, a pipeline (None without), the model and its optimizer."""
    config = ParallelismConfig(**sizes) if sizes else None
    accelerator = Accelerator(
        cpu=True, parity="exact", parallelism_config=config, gradient_accumulation_steps=accumulation
    )
    model: Any = tiny_llama(num_layers=4, tied=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    optimizer: Any = new_optimizer(model)
    if "pp_size" not in sizes:
        return (accelerator, None, *accelerator.prepare(model, optimizer))
    pipeline = accelerator.prepare_pipeline(
        model, schedule="1F1B", num_micro_batches=4, loss_fn=_loss, count_items=_count
    )
    return accelerator, pipeline, model, accelerator.prepare(optimizer)


def _state(accelerator: Accelerator, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return whole weights and optimizer state by the names of the first of tied weights; of a pipeline, those of this rank's stages."""

    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    named = {tied.get(n, n): p for n, p in reversed([*accelerator.unwrap_model(model).named_parameters()])}
    found = {name: whole(p) for name, p in named.items()}
    for name, p in named.items():
        found |= {f"{name}.{key}": whole(value) for key, value in optimizer.optimizer.state[p].items()}
    return found


def _saved(sizes: dict[str, int], folder: str) -> None:
    accelerator, pipeline, model, optimizer = _prepared(sizes)
    for batch in accelerator.prepare(_loader()):
        with accelerator.context_parallel(list(batch.values())):
            if pipeline is None:
                accelerator.backward(mean_loss(model, batch), num_items=_count(batch))
            else:
                pipeline.step(batch)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/weights")
    whole = optimizer.full_state_dict()
    if accelerator.is_main_process:
        torch.save(whole, f"{folder}/optimizer.bin")
    torch.save(_state(accelerator, model, optimizer), f"{folder}/{dist.get_rank()}.pt")


def _differences(sizes: dict[str, int], folders: dict[str, str]) -> list[str]:
    """Load every checkpoint, and every optimizer state alone, and return what differs from what was saved."""
    found = []
    for (saved, folder), is_alone in itertools.product(folders.items(), (False, True)):
        accelerator, _, model, optimizer = _prepared(sizes, factor=2.0)
        accelerator.prepare(_loader())
        expected = _whole(folder)
        if is_alone:
            optimizer.load_full_state_dict(torch.load(f"{folder}/optimizer.bin"))
            expected = {name: value for name, value in expected.items() if not name.endswith(".weight")}
        else:
            with warnings.catch_warnings():  # expected where more ranks read samples than before
                warnings.filterwarnings("ignore", message=".*contains RNG states for", category=EchelonWarning)
                accelerator.load_state(f"{folder}/state")
        loaded = _state(accelerator, model, optimizer)
        assert {name.rpartition(".")[2] for name in loaded} == {"weight", "exp_avg", "exp_avg_sq", "step"}
        if is_alone:
            loaded = {name: value for name, value in loaded.items() if not name.endswith(".weight")}
        found += [f"{saved}: {name}" for name, value in loaded.items() if not torch.equal(value, expected.pop(name))]
        if "pp_size" not in sizes:
            found += [f"{saved}: {name} is missing" for name in expected]
        accelerator.free_memory()
    return found


def _whole(folder: str) -> dict[str, torch.Tensor]:
    """Return what the ranks had when they saved."""
    found: dict[str, torch.Tensor] = {}
    for path in Path(folder).glob("*.pt"):
        found |= torch.load(path)
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["one process", "tp 2", "shard 2 x tp 2", "pp 2"], id="some", marks=pytest.mark.slow),
        pytest.param([*_LAYOUTS], id="all", marks=pytest.mark.soak),
    ],
)
def test_every_layout_loads_what_every_layout_saved(layouts: list[str], tmp_path: Path) -> None:
    folders = {}
    for saved in layouts:
        folders[saved] = str(tmp_path / saved.replace(" ", "_"))
        Path(folders[saved]).mkdir()
        sizes = _LAYOUTS[saved]
        run_on_ranks(_saved, sizes, folders[saved], world_size=math.prod(sizes.values()), timeout=180)
        # What another program would read.
        weights = saved_weights(f"{folders[saved]}/weights")
        expected = {name: value for name, value in _whole(folders[saved]).items() if name.endswith(".weight")}
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    for loaded in layouts:
        sizes = _LAYOUTS[loaded]
        answers = run_on_ranks(_differences, sizes, folders, world_size=math.prod(sizes.values()), timeout=600)
        assert answers == [[]] * len(answers), loaded


def _continued(sizes: dict[str, int], folder: str, until: int) -> dict[str, Any]:
    """Resume, train until the update ``until`` of the epoch, and save in the middle of it."""
    accelerator, pipeline, model, optimizer = _prepared(sizes, factor=2.0 if until > 1 else 1.0, accumulation=2)
    rows = [{k: v[i] for k, v in batch.items()} for batch in ragged_batches() for i in range(4)]
    loader = accelerator.prepare(DataLoader(rows, batch_size=8))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*contains RNG states for", category=EchelonWarning)
        accelerator.resume(folder)
    norms: list[float] = []
    for _ in accelerator.epochs(1):
        for batch in loader:
            with accelerator.accumulate(model):
                with accelerator.context_parallel(list(batch.values())):
                    if pipeline is None:
                        accelerator.backward(mean_loss(model, batch), num_items=_count(batch))
                    else:
                        pipeline.step(batch)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.progress.step == until:
                accelerator.save_state(folder)
                break
        if accelerator.progress.step == until:
            break
    return {"norms": norms, **_state(accelerator, model, optimizer)}


_CHAINS = [
    ["shard 2 x tp 2", "pp 2", "sp 2 x tp 2", "replicate 2 x shard 2", "cp 2"],
    ["pp 2 x tp 2", "one process", "shard 2 x cp 2", "tp 4", "pp 4"],
]


@pytest.mark.soak
@pytest.mark.parametrize("chain", _CHAINS, ids=" - ".join)
def test_a_run_that_changes_its_mesh_in_mid_epoch_is_that_of_one_process(chain: list[str], tmp_path: Path) -> None:
    """Each of the five updates of the epoch is on another mesh; the bound is that of the meshes with pieces of sequences."""
    expected = plain_updates(tiny_llama(num_layers=4, tied=True), ragged_batches())
    norms: list[float] = []
    for until, layout in enumerate(chain, start=1):
        sizes = _LAYOUTS[layout]
        world_size = math.prod(sizes.values())
        answers = run_on_ranks(_continued, sizes, str(tmp_path / "run"), until, world_size=world_size, timeout=120)
        norms += answers[0]["norms"]
        assert len(norms) == until
    for answer in answers:
        for name, value in answer.items():
            if name in expected.weights:
                torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=5e-12)
    assert norms == pytest.approx(expected.norms, rel=1e-12, abs=0)
