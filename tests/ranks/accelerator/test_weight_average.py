"""EMA and SWA: every engine and mesh has the averages of the formula, through accumulation, evaluation, saving and resuming."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from echelon import EMA, SWA, Accelerator, LocalSGD, ParallelismConfig
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import errors_on_ranks, import_ahead, run_on_ranks
from tests.parallel_models import (
    IGNORED,
    mean_loss,
    new_optimizer,
    num_tokens,
    ragged_batches,
    tiny_gpt,
    tiny_llama,
)
from tests.prepared_loop import whole
from tests.reference import saved_weights

import_ahead("transformers.models.llama.modeling_llama", "torch.distributed.pipelining")

# Engine or sizes of the mesh, and number of ranks.
_LAYOUTS: dict[str, tuple[Any, int]] = {
    "single": ("single", 1),
    "ddp 2": ("ddp", 2),
    "ddp 3": ("ddp", 3),
    "zero1 2": ("zero1", 2),
    "zero1 3": ("zero1", 3),
    "zero1 4": ("zero1", 4),
    "fsdp2 2": ("fsdp2", 2),
    "fsdp2 3": ("fsdp2", 3),
    "fsdp2 4": ("fsdp2", 4),
    "tp 2": ({"tp_size": 2}, 2),
    "shard 2 x tp 2": ({"dp_shard_size": 2, "tp_size": 2}, 4),
    "pp 2": ({"pp_size": 2}, 2),
    "pp 2 x shard 2": ({"pp_size": 2, "dp_shard_size": 2}, 4),
}
# Each of the updates is on another layout, which loads the checkpoint of the one before.
_QUICK = ["ddp 2", "zero1 3", "fsdp2 4", "single"]
_SLOW = [
    "tp 2",
    "zero1 2",
    "pp 2",
    "fsdp2 3",
    "shard 2 x tp 2",
    "ddp 3",
    "pp 2 x shard 2",
    "fsdp2 2",
    "zero1 4",
    "tp 2",
]
_ACCUMULATION = 2
# The weights are around 0.3; those of the mesh of float64 differ by the order of sums from those of the plain loop.
_EXACT = {"rtol": 0.0, "atol": 1e-12}


def _model(layout: str) -> Any:
    return tiny_gpt(tied=True) if layout in _QUICK else tiny_llama(num_layers=2, tied=True)


def _averages() -> dict[str, Any]:
    return {"ema": EMA(0.8), "ema_every": EMA(0.95, every=2, warmup=True), "swa": SWA(2, every=2)}


def _count(batch: Any) -> float:
    return float(num_tokens(batch["labels"]))


def _loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    labels = batch["labels"].flatten()
    total = nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total / max(1.0, _count(batch))


def _rows(num_updates: int) -> list[dict[str, torch.Tensor]]:
    batches = ragged_batches(2 * num_updates)
    return [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(4)]


def _continued(layout: str, folder: str, until: int, num_updates: int) -> float:
    """Resume, make update number ``until``, evaluate and save with averaged weights, and return the evaluation's loss."""
    engine, _ = _LAYOUTS[layout]
    sizes = engine if isinstance(engine, dict) else {}
    accelerator = Accelerator(
        cpu=True,
        parity="exact",
        engine=None if sizes else engine,
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        gradient_accumulation_steps=_ACCUMULATION,
    )
    model = _model(layout)
    if until > 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)  # replaced by those of the checkpoint
    optimizer: Any = new_optimizer(model)
    averages = _averages()
    pipeline = None
    if "pp_size" in sizes:
        pipeline = accelerator.prepare_pipeline(
            model, schedule="1F1B", num_micro_batches=2, loss_fn=_loss, count_items=_count
        )
        optimizer, *_ = accelerator.prepare(optimizer, *averages.values())
    else:
        model, optimizer, *_ = accelerator.prepare(model, optimizer, *averages.values())
    loader = accelerator.prepare(DataLoader(_rows(num_updates), batch_size=8))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*contains RNG states for", category=EchelonWarning)
        assert accelerator.resume(f"{folder}/state") is (until > 1)
    for _ in accelerator.epochs(1):
        for batch in loader:
            with accelerator.accumulate(model):
                if pipeline is None:
                    accelerator.backward(mean_loss(model, batch), num_items=_count(batch))
                else:
                    pipeline.step(batch)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                break
        break
    assert accelerator.progress.step == until
    before = [whole(p) for p in model.parameters()]
    batch = ragged_batches(1, seed=77)[0]
    for name, average in averages.items():
        with average.average_parameters():
            with torch.no_grad(), average.average_parameters():  # a nested one changes nothing
                if pipeline is None:
                    model.eval()
                    evaluated = mean_loss(model, batch).item()
                    model.train()
                else:
                    evaluated = _loss(
                        getattr(pipeline.evaluate(batch), "logits", pipeline.evaluate(batch)), batch
                    ).item()
            accelerator.save_model(model, f"{folder}/{name}")
            if name == "ema":
                loss = evaluated
                accelerator.save_state(f"{folder}/state")  # the weights of training, also here
    assert all(torch.equal(whole(p), value) for p, value in zip(model.parameters(), before))
    accelerator.wait_for_everyone()
    return loss


def _formula(num_updates: int, make: Callable[[], Any]) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return the averages after each update of a plain loop in one process."""
    model: Any = make()
    optimizer = new_optimizer(model)
    batches = ragged_batches(_ACCUMULATION * num_updates)
    found: list[dict[str, dict[str, torch.Tensor]]] = []
    history = [{name: value.detach().clone() for name, value in model.state_dict().items()}]
    for update in range(num_updates):
        window = batches[_ACCUMULATION * update : _ACCUMULATION * (update + 1)]
        total = sum(num_tokens(batch["labels"]) for batch in window)
        for batch in window:
            (mean_loss(model, batch) * (num_tokens(batch["labels"]) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        averages: dict[str, dict[str, torch.Tensor]] = {"ema": {}, "ema_every": {}, "swa": {}}
        for name, value in history[0].items():
            ema, every = value, value
            for step, weights in enumerate(history[1:], start=1):
                ema = 0.8 * ema + 0.2 * weights[name]
                if step % 2 == 0:
                    number = step // 2 - 1
                    decay = min(0.95, (1 + number) / (10 + number))
                    every = decay * every + (1 - decay) * weights[name]
            taken = [weights[name] for weights in history[2::2]]
            averages["ema"][name], averages["ema_every"][name] = ema, every
            averages["swa"][name] = sum(taken) / len(taken) if taken else history[-1][name]  # type: ignore[assignment]
        found.append(averages)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("chain", [_QUICK, pytest.param(_SLOW, marks=pytest.mark.soak)], ids=" - ".join)
def test_the_averages_are_those_of_the_formula_on_every_layout_through_saving_and_resuming(
    chain: list[str], tmp_path: Path
) -> None:
    make = partial(_model, chain[0])
    expected = _formula(len(chain), make)
    batch = ragged_batches(1, seed=77)[0]
    for until, layout in enumerate(chain, start=1):
        losses = run_on_ranks(
            _continued, layout, str(tmp_path), until, len(chain), world_size=_LAYOUTS[layout][1], timeout=180
        )
        for name, weights in expected[until - 1].items():
            saved = saved_weights(tmp_path / name)
            assert saved.keys() <= weights.keys()
            assert saved.keys() >= {n for n, _ in make().named_parameters()}
            for key, value in saved.items():
                assert (value - weights[key]).abs().max() <= 1e-12, (layout, name, key)
        model: Any = make()
        model.load_state_dict(expected[until - 1]["ema"])
        with torch.no_grad():
            assert losses == pytest.approx([mean_loss(model, batch).item()] * len(losses), rel=1e-12, abs=0), layout


# ---- what each rank stores ---------------------------------------------------------------------------------------------


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double()


def _step(accelerator: Accelerator, model: Any, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + accelerator.process_index)
    accelerator.backward(model(torch.randn(4, 8, generator=generator, dtype=torch.float64)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _num_stored(engine: str) -> tuple[int, int]:
    accelerator, model = Accelerator(cpu=True, engine=engine), _small()
    model, optimizer, ema = accelerator.prepare(model, torch.optim.Adam(model.parameters()), EMA(0.9))
    _step(accelerator, model, optimizer, 0)
    ((_, averages),) = ema.parts()
    state = optimizer.optimizer.state.values()
    local = [getattr(s["exp_avg"], "_local_tensor", s["exp_avg"]) for s in state if "exp_avg" in s]
    return sum(value.numel() for value in averages.values() if value is not None), sum(value.numel() for value in local)


@pytest.mark.parametrize(("engine", "is_divided"), [("ddp", False), ("zero1", True), ("fsdp2", True)])
def test_each_rank_stores_the_averages_of_what_it_has_the_optimizer_state_of(engine: str, is_divided: bool) -> None:
    counts = run_on_ranks(_num_stored, engine, world_size=2)
    total = sum(p.numel() for p in _small().parameters())
    assert [averages for averages, _ in counts] == [state for _, state in counts]
    assert sum(averages for averages, _ in counts) == (total if is_divided else 2 * total)
    assert all(0 < averages < total or not is_divided for averages, _ in counts)


class _ByNorm(torch.optim.Optimizer):
    """Divides each gradient by its norm, so that fsdp2 gathers the parameters to step them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / p.grad.norm())


def _gathered(world_size: int) -> list[list[torch.Tensor]]:
    accelerator, model = Accelerator(cpu=True, engine="fsdp2" if world_size > 1 else "single"), _small()
    model, optimizer, ema = accelerator.prepare(model, _ByNorm(model.parameters()), EMA(0.9))
    for number in range(3):
        accelerator.backward(
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).double()).square().mean()
        )
        optimizer.step()
        optimizer.zero_grad()
    with ema.average_parameters():
        return [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])  # two ranks have shards of one size, three have not
def test_averages_of_gathered_parameters_are_averages_of_their_shards(world_size: int) -> None:
    model = _small()
    averages = [p.detach().clone() for p in model.parameters()]
    optimizer = _ByNorm(model.parameters())
    for number in range(3):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averages = [0.9 * a + 0.1 * p.detach() for a, p in zip(averages, model.parameters())]
    for found in run_on_ranks(_gathered, world_size, world_size=world_size):
        torch.testing.assert_close(found, averages, **_EXACT)


def _after_an_evaluation_that_fails(engine: str) -> bool:
    """Return whether the weights of training are back on each rank, though only one of them has left by an error."""
    accelerator, model = Accelerator(cpu=True, engine=engine), _small()
    model, optimizer, ema = accelerator.prepare(model, torch.optim.Adam(model.parameters()), EMA(0.9))
    _step(accelerator, model, optimizer, 0)
    before = [whole(p) for p in model.parameters()]
    try:
        with ema.average_parameters():
            changed = any(not torch.equal(whole(p), value) for p, value in zip(model.parameters(), before))
            if accelerator.process_index == 1:
                raise KeyError
    except KeyError:
        pass
    return changed and all(torch.equal(whole(p), value) for p, value in zip(model.parameters(), before))


@pytest.mark.parametrize("engine", ["zero1", "fsdp2"])
def test_the_weights_of_training_come_back_without_communication(engine: str) -> None:
    assert run_on_ranks(_after_an_evaluation_that_fails, engine, world_size=2) == [True, True]


def _evaluated_between_steps(engine: str, reshard: bool) -> list[torch.Tensor]:
    """Return the weights of a training in which each step is followed by an evaluation with averaged weights."""
    from echelon import FullyShardedDataParallelPlugin

    plugin = (
        FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=reshard) if engine == "fsdp2" else None
    )
    accelerator, model = Accelerator(cpu=True, engine=engine, fsdp_plugin=plugin), _small()
    model, optimizer, ema = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), EMA(0.5))
    for number in range(4):
        _step(accelerator, model, optimizer, number)
        with ema.average_parameters():
            model(torch.ones(1, 8, dtype=torch.float64))  # with gradients: FSDP2 may keep the gathered weights
    return [whole(p) for p in model.parameters()]


def _not_evaluated() -> list[torch.Tensor]:
    accelerator, model = Accelerator(cpu=True, engine="ddp"), _small()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for number in range(4):
        _step(accelerator, model, optimizer, number)
    return [whole(p) for p in model.parameters()]


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_weights_are_not_used_after_the_shards_changed(reshard: bool) -> None:
    expected = run_on_ranks(_not_evaluated, world_size=2)[0]
    for found in run_on_ranks(_evaluated_between_steps, "fsdp2", reshard, world_size=2):
        for value, reference in zip(found, expected):
            torch.testing.assert_close(value, reference, **_EXACT)


# ---- steps that differ between ranks -----------------------------------------------------------------------------------


def _step_alone(how: str) -> None:
    accelerator, model = Accelerator(cpu=True, engine="ddp"), _small()
    model, optimizer, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA(0.9))
    with LocalSGD(accelerator, model, 2) if how == "LocalSGD" else accelerator.join_uneven_inputs([model]):
        _step(accelerator, model, optimizer, 0)


@pytest.mark.parametrize("how", ["LocalSGD", "join_uneven_inputs"])
def test_steps_that_differ_between_ranks_are_refused(how: str) -> None:
    texts = errors_on_ranks(UsageError, _step_alone, how, num_errors=2)
    assert all("EMA cannot average the weights of steps that differ between ranks" in text for text in texts)


def _prepared_with_deepspeed() -> None:
    accelerator, model = Accelerator(cpu=True, engine="deepspeed"), _small().float()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader([1, 2], batch_size=1), EMA(0.9))  # type: ignore[arg-type]


@pytest.mark.deepspeed
def test_deepspeed_is_refused_by_name() -> None:
    texts = errors_on_ranks(UsageError, _prepared_with_deepspeed, world_size=1)
    assert "EMA does not work with the deepspeed engine" in texts[0]
    assert "use the fsdp2 engine" in texts[0]


# ---- averages that scripts compute themselves --------------------------------------------------------------------------


class EMAModel:
    """An average in the manner of diffusers' scripts: of a list of parameters, which the script passes to each call."""

    def __init__(self, parameters: Any, decay: float) -> None:
        self.shadow_params = [p.detach().clone() for p in parameters]
        self.decay, self.optimization_step = decay, 0
        self.temp_stored_params: list[torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        self.optimization_step += 1
        for shadow, parameter in zip(self.shadow_params, list(parameters)):
            shadow.sub_((1 - self.decay) * (shadow - parameter))

    def store(self, parameters: Any) -> None:
        self.temp_stored_params = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters: Any) -> None:
        for shadow, parameter in zip(self.shadow_params, list(parameters)):
            parameter.copy_(shadow)

    @torch.no_grad()
    def restore(self, parameters: Any) -> None:
        assert self.temp_stored_params is not None
        for stored, parameter in zip(self.temp_stored_params, list(parameters)):
            parameter.copy_(stored)
        self.temp_stored_params = None

    def state_dict(self) -> dict[str, Any]:
        return {"optimization_step": self.optimization_step, "shadow_params": self.shadow_params}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimization_step = state_dict["optimization_step"]
        for own, saved in zip(self.shadow_params, state_dict["shadow_params"]):
            own.copy_(saved)


def _script(engine: str, folder: str, saves_by: str) -> list[torch.Tensor]:
    """A training as diffusers' scripts write it with --use_ema: steps 0 to 3, and again from the checkpoint of step 2."""

    def prepared() -> tuple[Any, Any, Any, EMAModel]:
        accelerator = Accelerator(cpu=True, engine=engine, gradient_accumulation_steps=2)
        model = _small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        ema_model = EMAModel(accelerator.unwrap_model(model).parameters(), 0.7)
        if saves_by == "registration":
            accelerator.register_for_checkpointing(ema_model)
            return accelerator, model, optimizer, ema_model

        def save_model_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if accelerator.is_main_process:
                torch.save(ema_model.state_dict(), f"{output_dir}/unet_ema.pt")

        def load_model_hook(models: list[Any], input_dir: str) -> None:
            ema_model.load_state_dict(torch.load(f"{input_dir}/unet_ema.pt"))

        accelerator.register_save_state_pre_hook(save_model_hook)
        accelerator.register_load_state_pre_hook(load_model_hook)
        return accelerator, model, optimizer, ema_model

    def train(accelerator: Any, model: Any, optimizer: Any, ema_model: EMAModel, steps: range) -> None:
        for micro_step in range(2 * steps.start, 2 * steps.stop):
            with accelerator.accumulate(model):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(micro_step), dtype=torch.float64)
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.step(model.parameters())

    first = prepared()
    train(*first, range(2))
    first[0].save_state(folder)
    first[0].free_memory()
    accelerator, model, optimizer, ema_model = prepared()
    accelerator.load_state(folder)
    train(accelerator, model, optimizer, ema_model, range(2, 4))
    before = [whole(p) for p in model.parameters()]
    ema_model.store(model.parameters())
    ema_model.copy_to(model.parameters())
    found = [whole(p) for p in model.parameters()]
    ema_model.restore(model.parameters())
    assert all(torch.equal(whole(p), value) for p, value in zip(model.parameters(), before))
    return found


def _averaged_by_hand(decay: float, num_steps: int) -> list[torch.Tensor]:
    model = _small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(num_steps):
        for micro_step in (2 * step, 2 * step + 1):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(micro_step), dtype=torch.float64)
            (model(x).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        average = [decay * a + (1 - decay) * p.detach() for a, p in zip(average, model.parameters())]
    return average


@pytest.mark.parametrize(
    ("engine", "world_size", "saves_by"),
    [("single", 1, "hooks"), ("ddp", 2, "hooks"), ("zero1", 2, "registration"), ("fsdp2", 2, "registration")],
)
def test_the_average_of_diffusers_scripts_works_unchanged(
    engine: str, world_size: int, saves_by: str, tmp_path: Path
) -> None:
    expected = _averaged_by_hand(0.7, 4)
    for found in run_on_ranks(_script, engine, str(tmp_path / "state"), saves_by, world_size=world_size):
        for value, reference in zip(found, expected):
            torch.testing.assert_close(value, reference, **_EXACT)


def _averaged_model(engine: str) -> list[torch.Tensor]:
    accelerator, model = Accelerator(cpu=True, engine=engine, gradient_accumulation_steps=2), _small()
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    average.update_parameters(model)  # the first update copies
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if engine == "fsdp2":
        average.module = accelerator.prepare(average.module)
    for micro_step in range(8):
        with accelerator.accumulate(model):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(micro_step), dtype=torch.float64)
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.update_parameters(accelerator.unwrap_model(model))
    return [whole(p) for p in average.parameters()]


@pytest.mark.parametrize(("engine", "world_size"), [("single", 1), ("ddp", 2), ("zero1", 2), ("fsdp2", 2)])
def test_torchs_averaged_model_works_unchanged(engine: str, world_size: int) -> None:
    for found in run_on_ranks(_averaged_model, engine, world_size=world_size):
        for value, reference in zip(found, _averaged_by_hand(0.7, 4)):
            torch.testing.assert_close(value, reference, **_EXACT)
