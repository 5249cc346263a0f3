"""The engine deepspeed in stages 0 to 3, against a plain loop on one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator
from echelon.base import environ
from echelon.base.errors import ConfigError, UsageError
from echelon.testing import engine_contract
from echelon.utils import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    GatheredParameters,
    map_pytorch_optim_to_deepspeed,
)
from tests.harness import errors_on_ranks, run_on_ranks
from tests.prepared_loop import heard, share_of, train_prepared
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain
from tests.reference import PlainTraining, gaussian, mean_square, tanh_net, train_updates

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.deepspeed

# Stage and location of the optimizer state.
LAYOUTS = [(0, "none"), (1, "none"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")]
STAGES = [0, 1, 2, 3]


def _plugin(stage: int, offload: str = "none", **more: Any) -> DeepSpeedPlugin:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # otherwise small parameters would not be sharded
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload}
    return DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero, "gradient_accumulation_steps": "auto", **more})


def _accelerator(stage: int, offload: str = "none", **more: Any) -> Accelerator:
    return Accelerator(deepspeed_plugin=_plugin(stage, offload), **more)


def _model() -> nn.Module:
    return tanh_net(5, 8, 3, dtype=torch.float32)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _data() -> torch.Tensor:
    """Return [updates, micro-steps, samples of all ranks, features]."""
    return gaussian(6, 2, 12, 5, dtype=torch.float32)


def _plain() -> PlainTraining:
    def clip(parameters: Any) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, 0.05)

    model = _model()
    return train_updates(model, lambda x: mean_square(model(x)), _data(), _adam(model), clip=clip)


def _assert_like(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)  # float32, sums in another order


@contextmanager
def _fp16(is_supported: bool) -> Iterator[None]:
    """Make DeepSpeed accept fp16, or not, independently of this CPU's instructions; torch supports it in any case."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    device.is_fp16_supported = lambda: is_supported
    try:
        yield
    finally:
        del device.is_fp16_supported


def _check(check: engine_contract.Check, stage: int) -> None:
    with _fp16(True):
        check(partial(_accelerator, stage))


@pytest.mark.slow
@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
# The tests of loops and layouts below cover the specifics of the other stages.
@pytest.mark.parametrize("stage", [pytest.param(n, marks=[pytest.mark.soak] if n < 3 else []) for n in STAGES])
def test_the_engine_contract(stage: int, check: engine_contract.Check) -> None:
    run_on_ranks(_check, check, stage, world_size=2)


def _train(accelerator: Accelerator, counts_items: bool) -> tuple[Any, Any, list[float]]:
    model = _model()
    weights, biases = ([p for p in model.parameters() if p.dim() == num_dims] for num_dims in (2, 1))
    # DeepSpeed steps one group after the other, and then gathers the weights.
    optimizer: Any = torch.optim.AdamW([{"params": weights}, {"params": biases}], lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = map(share_of, _data().flatten(0, 1))
    norms = train_prepared(accelerator, model, optimizer, batches, max_norm=0.05, counts_items=counts_items)
    return model, optimizer, norms


def _on_the_host(stage: int) -> tuple[dict[str, torch.Tensor] | None, list[float], str]:
    accelerator = _accelerator(stage, "cpu", gradient_accumulation_steps=2)
    model, _, norms = _train(accelerator, counts_items=True)
    assert isinstance(accelerator.unwrap_model(model), nn.Sequential)
    assert accelerator.capabilities.shards_optimizer_state == (stage > 0)
    return accelerator.get_state_dict(model), norms, str(accelerator.distributed_type)


@pytest.mark.parametrize("stage", [2, 3])
def test_training_with_offloaded_state_matches_one_process(stage: int) -> None:
    plain = _plain()
    results = run_on_ranks(_on_the_host, stage, world_size=2)
    assert [state is None for state, _, _ in results] == [False, stage == 3]
    for state, norms, kind in results:
        assert kind == "DistributedType.DEEPSPEED"
        assert norms == pytest.approx(plain.norms, rel=1e-5)
        if state is not None:
            _assert_like(state, plain.state)


def _odd_loops(stage: int, offload: str) -> tuple[dict[str, torch.Tensor] | None, float]:
    """Loops that DeepSpeed itself would train wrongly: two backward passes before a step, gradients dropped."""
    accelerator = _accelerator(stage, offload)
    model = _model()
    model, optimizer = accelerator.prepare(model, _adam(model))
    optimizer.step()  # without gradients it does nothing, like torch
    for window in _data():
        accelerator.backward(model(share_of(window[1]) * 3).square().mean())
        optimizer.zero_grad()  # discarded
        losses = [model(share_of(x)).square().mean() for x in window]  # both forward passes run first
        for loss in losses:
            accelerator.backward(loss / 2)
        accelerator.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    with (
        pytest.raises(UsageError, match="backward\\(\\) was called between clipping and step")
        if stage
        else nullcontext()
    ):
        accelerator.backward(model(share_of(_data()[0, 0])).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        accelerator.backward(model(share_of(_data()[0, 0])).square().mean())
    optimizer.zero_grad()
    with GatheredParameters(model.parameters()):
        assert [tuple(p.shape) for p in model.parameters()] == [(8, 5), (8,), (3, 8), (3,)]
    model.eval()
    with torch.no_grad():
        output = model(_data()[0, 0]).sum().item()
    return accelerator.get_state_dict(model), output


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stage", "offload"), LAYOUTS)
def test_common_loop_variants_match_the_reference(stage: int, offload: str) -> None:
    plain = _plain()
    results = run_on_ranks(_odd_loops, stage, offload, world_size=2)
    assert results[0][0] is not None
    _assert_like(results[0][0], plain.state)
    for _, output in results:
        assert output == pytest.approx(plain.model(_data()[0, 0]).sum().item(), rel=1e-4)


def _state(stage: int, offload: str, precision: str, folder: Path) -> list[bool]:
    with _fp16(True):
        return _continued(stage, offload, precision, folder)


def _continued(stage: int, offload: str, precision: str, folder: Path) -> list[bool]:
    """Train, save the state in two ways, and continue; models with these states must continue bit for bit."""
    equal = []
    ends = []
    kept: Any = None
    for kind in ("first", "whole", "files"):
        accelerator = _accelerator(stage, offload, mixed_precision=precision)
        model = _model()
        model, optimizer = accelerator.prepare(model, _adam(model))
        engine = accelerator.session.engine
        if kind == "first":
            train_prepared(accelerator, model, optimizer, map(share_of, _data()[:3, 0]))
            weights = accelerator.get_state_dict(model)
            objects = copy.deepcopy([weights, engine.full_optimizer_state(optimizer.optimizer)])
            dist.broadcast_object_list(objects)
            kept = objects
            accelerator.save_state(folder)
        elif kind == "whole":
            accelerator.unwrap_model(model).load_state_dict(kept[0])
            engine.load_full_optimizer_state(optimizer.optimizer, copy.deepcopy(kept[1]))
        else:
            accelerator.load_state(folder)
        train_prepared(accelerator, model, optimizer, map(share_of, _data()[3:, 0]))
        ends.append(accelerator.get_state_dict(model))
        accelerator.free_memory()
        if dist.get_rank() == 0:
            equal.append(all(torch.equal(value, ends[0][name]) for name, value in ends[-1].items()))
    if dist.get_rank() == 0:
        plain = _model()
        optimizer = _adam(plain)
        optimizer.load_state_dict(kept[1])  # the numbers and shapes are those of torch
        equal.append(float(optimizer.state_dict()["state"][0]["step"]) == 3.0)
    return equal


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stage", "offload", "precision"),
    [
        (0, "none", "no"),
        (1, "none", "bf16"),
        pytest.param(2, "cpu", "bf16", marks=pytest.mark.soak),
        (2, "none", "fp16"),
        (3, "none", "bf16"),
        pytest.param(3, "cpu", "no", marks=pytest.mark.soak),
    ],
)
def test_saved_state_resumes_exactly(stage: int, offload: str, precision: str, tmp_path: Path) -> None:
    results = run_on_ranks(_state, stage, offload, precision, tmp_path / "state", world_size=2)
    assert results[0] == [True] * 4


def _refusals() -> list[str]:
    """Return the errors for operations that DeepSpeed does not support."""
    said = []

    def refused(kind: type[Exception], run: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as caught:
            run(*args, **kwargs)
        said.append(str(caught.value))

    first, second = _model(), nn.Linear(5, 3)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    refused(UsageError, _accelerator(2).prepare, first, second, both)
    refused(UsageError, _accelerator(2).prepare, first, _adam(first), _adam(first))
    refused(UsageError, _accelerator(2).prepare, _adam(first))
    refused(UsageError, _accelerator(2).prepare, first.double(), _adam(first))
    with _fp16(False):
        refused(ConfigError, _accelerator(2, mixed_precision="fp16").prepare, second, _adam(second))
    refused(ConfigError, _accelerator(2).prepare, second, DummyOptim(second.parameters()))
    configured = {"type": "AdamW", "params": {"lr": 0.1}}
    refused(ConfigError, Accelerator(deepspeed_plugin=_plugin(2, optimizer=configured)).prepare, second, _adam(second))
    refused(ConfigError, Accelerator(engine="ddp").prepare, second, DummyOptim(second.parameters()))
    accelerator = _accelerator(2)
    model, optimizer, _ = accelerator.prepare(second, _adam(second), nn.Linear(2, 2))  # the last one is for evaluation
    accelerator.backward(model(torch.ones(2, 5)).sum())
    refused(UsageError, accelerator.clip_grad_norm_, list(model.parameters())[:1], 1.0)
    refused(UsageError, accelerator.clip_grad_norm_, model.parameters(), 1.0, norm_type=1)
    refused(UsageError, accelerator.clip_grad_value_, model.parameters(), 1.0)
    refused(UsageError, optimizer.step, lambda: None)
    with accelerator.no_sync(model, unsynced=True):
        refused(UsageError, optimizer.step)
    return said


@pytest.mark.slow
def test_unsupported_operations_raise() -> None:
    said = run_on_ranks(_refusals, world_size=2)[0]
    expected = [
        "DeepSpeed trains one model per Accelerator, but 2 models",
        "prepare() got 2",
        "do not belong to any of the models passed with it",
        "keeps weights in float32, but the model has float64",
        "DeepSpeed does not support fp16 on this device (cpu)",
        "got a DummyOptim, but DeepSpeed's config does not define an optimizer",
        "defines an optimizer (AdamW), but prepare() also got AdamW",
        "prepare() got a DummyOptim, which is a placeholder for an entry in the DeepSpeed config",
        "got 1 parameters, but DeepSpeed clips all 2",
        "clips only by the 2-norm",
        "does not support clipping by value",
        "engine does not support AdamW.step(closure)",
        "cannot step with the gradients from one rank",
    ]
    assert [part in text for part, text in zip(expected, said, strict=True)] == [True] * len(expected), said


def _by_config() -> tuple[list[float], list[Any], dict[str, Any]]:
    """Train with the optimizer and the scheduler of a config with "auto" values."""
    config = {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": {"device": "cpu", "pin_memory": False},
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), mixed_precision="bf16")
    model = _model()
    model.config = type("Config", (), {"hidden_size": 8})()  # type: ignore[assignment]
    optimizer: Any = DummyOptim(model.parameters(), lr=0.05, weight_decay=0.01)
    schedule: Any = DummyScheduler(optimizer, warmup_num_steps=4)
    loader: Any = torch.utils.data.DataLoader(_data()[0, 0], batch_size=3)  # type: ignore[arg-type]
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, rates = [], []
    for _ in range(3):
        for x in loader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            rates.append(schedule.get_last_lr()[0])
    assert accelerator.deepspeed_plugin is not None
    shown = accelerator.deepspeed_plugin.deepspeed_config
    return losses, rates, {**shown["zero_optimization"], **shown["optimizer"]["params"], **shown}


def test_a_config_with_auto_values_trains_with_its_optimizer_and_schedule() -> None:
    losses, rates, shown = run_on_ranks(_by_config, world_size=2)[0]
    assert losses[-1] < losses[0] / 2
    assert rates == pytest.approx([0.0, 0.0125, 0.025, 0.0375, 0.05, 0.05], abs=1e-9)  # one step per update
    assert (shown["train_batch_size"], shown["train_micro_batch_size_per_gpu"]) == (6, 3)
    assert (shown["gradient_accumulation_steps"], shown["gradient_clipping"]) == (1, 1.0)
    assert (shown["reduce_bucket_size"], shown["stage3_prefetch_bucket_size"]) == (64, 57)
    assert (shown["lr"], shown["weight_decay"], shown["bf16"]) == (0.05, 0.01, {"enabled": True})


def _compiled(folder: Path) -> tuple[dict[str, torch.Tensor] | None, str, list[str]]:
    """Train with offloaded state and DeepSpeed's optimizer, which it compiles."""
    with environ.patch({"TORCH_EXTENSIONS_DIR": str(folder)}), heard("echelon") as said:
        plugin = _plugin(2, "cpu", zero_force_ds_cpu_optimizer=True)
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
        model, optimizer, _ = _train(accelerator, counts_items=False)
        assert type(map_pytorch_optim_to_deepspeed(_adam(_model()))).__name__ == "DeepSpeedCPUAdam"
    return accelerator.get_state_dict(model), type(optimizer.optimizer).__name__, said


@pytest.mark.soak
def test_deepspeed_compiles_its_optimizers(tmp_path: Path) -> None:
    state, kind, said = run_on_ranks(_compiled, tmp_path, world_size=2, timeout=600)[0]
    assert state is not None
    _assert_like(state, _plain().state)
    assert kind == "DeepSpeedCPUAdam"
    assert any(
        f"DeepSpeed is compiling cpu_adam, which takes several minutes. The result is cached in {tmp_path}" in line
        for line in said
    )


def _alone() -> tuple[bool, float]:
    """Train on one process, for which DeepSpeed also needs a group."""
    accelerator = _accelerator(2, "cpu", cpu=True)
    model = _model()
    model, optimizer = accelerator.prepare(model, _adam(model))
    x = _data()[0, 0]
    first = model(x).square().mean().item()
    for _ in range(5):
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    last = model(x).square().mean().item()
    accelerator.end_training()
    return dist.is_initialized(), last / first


def test_one_process_trains_without_a_launcher() -> None:
    still_there, ratio = run_on_ranks(_alone, world_size=1, init_group=False)[0]
    assert not still_there
    assert ratio < 0.5


def _other_parameters(stage: int, form: str) -> dict[str, torch.Tensor] | None:
    accelerator = _accelerator(stage, gradient_accumulation_steps=_data().shape[1])
    bare: Any = _model()
    bare[0].requires_grad_(form != "unfrozen")
    model, optimizer = accelerator.prepare(bare, _adam(bare))
    for update, window in enumerate(_data()):
        if update == 2 and form == "added":
            bare[0].more = torch.nn.Parameter(torch.ones(1))
        elif update == 2:
            bare[0].requires_grad_(form == "unfrozen")
        train_prepared(accelerator, model, optimizer, map(share_of, window))
    return accelerator.get_state_dict(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stage", "form"), [(1, "unfrozen"), (2, "frozen"), (3, "unfrozen"), (0, "added"), (3, "added")]
)
def test_the_error_for_changed_parameters_names_them(stage: int, form: str) -> None:
    for text in errors_on_ranks(UsageError, _other_parameters, stage, form, world_size=2):
        assert ("0.more" if form == "added" else "0.weight") in text


def test_stage_0_trains_unfrozen_parameters() -> None:
    """Against a plain loop: float32, AdamW."""
    model: Any = _model()
    model[0].requires_grad_(False)
    plain = train_updates(
        model,
        lambda x: mean_square(model(x)),
        _data(),
        _adam(model),
        before=lambda update: model[0].requires_grad_(update >= 2),
    )
    whole, *_ = run_on_ranks(_other_parameters, 0, "unfrozen", world_size=2)
    assert whole is not None
    _assert_like(whole, plain.state)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_loader_that_is_prepared_with_the_model_is_sharded_once(sharded: bool) -> None:
    program = Program(num_samples=22, order="sampler", already_sharded=sharded, float32=True)
    require_plain([Case(program=program, layout=Layout(world_size=2, engine="deepspeed stage 2"))])
