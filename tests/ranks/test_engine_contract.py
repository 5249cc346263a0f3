"""What every engine must do; each new one is added to ENGINES and passes all of it."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from echelon import Accelerator, GradScalerKwargs
from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.engines.base import Engine
from echelon.engines.registry import ENGINES, choose, load
from echelon.world.world import World
from tests.counting_engine import CountingEngine, installed
from tests.cpu_data_parallel import cpu_devices
from tests.harness import run_on_ranks

# engine -> the numbers of ranks that it runs on
LAYOUTS = [
    ("single", 1),
    ("ddp", 1),
    ("ddp", 2),
    ("ddp", 3),
    ("dp", 1),
    ("zero1", 2),
    ("zero1", 3),
    ("fsdp2", 2),
    ("fsdp2", 3),
    ("counting", 2),
]
UP_TO_TWO = [(engine, world_size) for engine, world_size in LAYOUTS if world_size < 3]


def test_every_registered_engine_is_tested_here() -> None:
    assert {name for name, _ in LAYOUTS} == {*ENGINES, "counting"}


@contextmanager
def _around(engine: str) -> Iterator[None]:
    """Make the surroundings in which ``engine`` runs here."""
    with ExitStack() as stack:
        if engine == "dp":
            stack.enter_context(cpu_devices(2))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "the engine dp copies", EchelonWarning)
        if engine == "counting":
            stack.enter_context(installed())
        yield


def _inside(engine: str, run: Callable[..., Any], *args: Any) -> Any:
    with _around(engine):
        return run(engine, *args)


def _run(run: Callable[..., Any], engine: str, *args: Any, world_size: int) -> list[Any]:
    """Call ``run(engine, ...)`` on the ranks."""
    return run_on_ranks(_inside, engine, run, *args, world_size=world_size)


def test_every_engine_is_final_and_whole() -> None:
    for name in ENGINES:
        engine = load(name)
        assert engine.__bases__ == (Engine,)
        assert not engine.__abstractmethods__


def test_the_default_engine() -> None:
    assert (choose(world_size=1), choose(world_size=2)) == ("single", "ddp")


def test_an_unknown_engine_gives_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ddp'"):
        load("ddq")


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_tpus_are_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match="does not run on TPUs") as caught:
        Accelerator(engine=name, cpu=True)
    assert "torch.accelerator knows" in str(caught.value)
    assert "entry point 'echelon.engines'" in str(caught.value)


def test_an_engine_of_an_installed_package_is_found_by_its_entry_point() -> None:
    with pytest.raises(ConfigError, match="there is no engine 'counting'"):
        load("counting")
    with installed():
        assert load("counting") is CountingEngine


def _counted() -> tuple[int, bool]:
    engine = CountingEngine(World.current())
    accelerator = Accelerator(engine=engine, gradient_accumulation_steps=2)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in map(_mine, _data()[:, 0]):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return engine.num_steps, accelerator._engine is engine


def test_an_engine_may_be_given_as_an_object() -> None:
    assert run_on_ranks(_counted) == [(3, True)] * 2


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _data() -> torch.Tensor:
    """Return [updates, micro-steps, samples of all ranks, features]; 12 samples, divisible by 1, 2 and 3."""
    return torch.randn(6, 2, 12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _reference(updates: int = 6) -> tuple[list[torch.Tensor], list[float]]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for window in _data()[:updates]:
        optimizer.zero_grad()
        for x in window:
            (model(x).square().mean() / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
    return [p.detach() for p in model.parameters()], norms


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _mine(x: torch.Tensor) -> torch.Tensor:
    share = len(x) // dist.get_world_size()
    return x[dist.get_rank() * share : (dist.get_rank() + 1) * share]


def _train(engine: str, weighted: bool) -> tuple[list[torch.Tensor], list[float], bool]:
    accelerator = Accelerator(engine=engine, gradient_accumulation_steps=2)
    assert accelerator.capabilities.name == engine
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    norms = []
    for window in _data():
        for x in map(_mine, window):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean(), num_items=len(x) if weighted else None)
                if accelerator.sync_gradients:
                    assert accelerator._engine.reduced(model)
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
                optimizer.step()
                optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    return [_whole(p) for p in inner.parameters()], norms, isinstance(inner, nn.Sequential)


@pytest.mark.parametrize(("engine", "world_size"), LAYOUTS)
@pytest.mark.parametrize("weighted", [False, True])
def test_it_trains_like_one_process(engine: str, world_size: int, weighted: bool) -> None:
    weights, norms = _reference()
    for mine, my_norms, unwrapped in _run(_train, engine, weighted, world_size=world_size):
        assert unwrapped
        assert my_norms == pytest.approx(norms, rel=1e-12)  # float64, sums in another order
        assert all((p - q).norm() <= 1e-12 * q.norm() for p, q in zip(mine, weights))


def _state(engine: str) -> float:
    """Train, keep the state, train on; a fresh model with that state must go the same way."""
    accelerator = Accelerator(engine=engine)
    x = _mine(_data()[0, 0])

    def fresh() -> tuple[Any, Any]:
        model = _model()
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))  # type: ignore[no-any-return]

    def steps(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = fresh()
    steps(model, optimizer)
    saved = io.BytesIO()
    torch.save(accelerator._engine.sharded_state(model, [optimizer.optimizer]), saved)
    full = copy.deepcopy(accelerator.get_state_dict(model))
    steps(model, optimizer)
    other, other_optimizer = fresh()
    saved.seek(0)
    accelerator._engine.load_sharded_state(other, [other_optimizer.optimizer], torch.load(saved, weights_only=True))
    loaded = accelerator.get_state_dict(other)
    assert (full is None) == (loaded is None) == (accelerator.capabilities.shards_parameters and dist.get_rank() > 0)
    if full is not None and loaded is not None:
        assert list(full) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert all(torch.equal(value, loaded[name]) for name, value in full.items())
    steps(other, other_optimizer)
    with torch.no_grad():
        pairs = zip(map(_whole, model.parameters()), map(_whole, other.parameters()))
        return max(float((p - q).norm() / q.norm()) for p, q in pairs)


@pytest.mark.parametrize(("engine", "world_size"), LAYOUTS)
def test_its_state_continues_where_it_was(engine: str, world_size: int) -> None:
    # Equal bits up to two ranks. With three a sum depends on where a gradient lies in its bucket, and DDP lays out the
    # buckets of a fresh wrapper anew: float64 rounding, which AdamW's division may enlarge.
    for difference in _run(_state, engine, world_size=world_size):
        assert difference == 0 if world_size < 3 else difference <= 1e-9


def _scaled(engine: str) -> list[Any]:
    """One step with infinite gradients between good ones, fp16; two optimizers."""
    accelerator = Accelerator(
        engine=engine, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)]
    )
    torch.manual_seed(0)
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    models = [first, second]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1) for o in optimizers]
    (first, second), optimizers, schedulers = accelerator.prepare(models, optimizers, schedulers)
    seen: list[Any] = []
    for factor in (1.0, float("inf"), 1.0):
        x = torch.ones(3, 4)
        before = first.state_dict()[next(iter(first.state_dict()))].clone()
        output = first(x)
        assert output.dtype == torch.float32
        accelerator.backward((output.square().mean() + second(x).square().mean()) * factor)
        norm = float(accelerator.clip_grad_norm_(first.parameters(), 1e6))
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        after = first.state_dict()[next(iter(first.state_dict()))]
        moved = not torch.equal(before, after)
        seen.append((moved, accelerator.optimizer_step_was_skipped, norm < 100, schedulers[0].scheduler.last_epoch))
    return seen


@pytest.mark.parametrize(("engine", "world_size"), LAYOUTS)
def test_an_infinite_fp16_step_is_skipped_by_optimizer_and_scheduler(engine: str, world_size: int) -> None:
    n = world_size  # accelerate's meaning: a schedule advances num_processes times per update
    for seen in _run(_scaled, engine, world_size=world_size):
        assert seen == [(True, False, True, n), (False, True, False, n), (True, False, True, 2 * n)]


def _bf16(engine: str) -> tuple[str, str, list[float]]:
    accelerator = Accelerator(engine=engine, mixed_precision="bf16")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(5):
        loss = model(torch.ones(3, 4)).square().mean()
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with accelerator.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    return str(product.dtype), str(loss.dtype), losses


@pytest.mark.parametrize(("engine", "world_size"), UP_TO_TWO)
def test_bf16_computes_in_bf16_and_returns_float32(engine: str, world_size: int) -> None:
    for product, loss, losses in _run(_bf16, engine, world_size=world_size):
        assert (product, loss) == ("torch.bfloat16", "torch.float32")
        assert losses[-1] < losses[0]


def _uneven(engine: str) -> list[int]:
    """Rank r trains r + 1 steps inside join; afterwards all must still agree."""
    accelerator = Accelerator(engine=engine)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = 0
    with accelerator._engine.join([model]):
        for _ in range(dist.get_rank() + 1):
            accelerator.backward(model(_mine(_data()[0, 0])).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return [steps, hash(tuple(p.sum().item() for p in accelerator.unwrap_model(model).parameters()))]


# fsdp2 cannot (Capabilities.joins_uneven): its ranks need each other's shards in every layer.
@pytest.mark.parametrize(("engine", "world_size"), [layout for layout in UP_TO_TWO if layout[0] != "fsdp2"])
def test_ranks_may_end_at_different_steps_inside_join(engine: str, world_size: int) -> None:
    results = _run(_uneven, engine, world_size=world_size)
    assert [steps for steps, _ in results] == list(range(1, world_size + 1))
    assert len({weights for _, weights in results}) == 1


def _evaluation(engine: str) -> list[float]:
    accelerator = Accelerator(engine=engine)
    model = accelerator.prepare(nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)))
    model.eval()
    loader = accelerator.prepare(torch.utils.data.DataLoader(_data()[0, 0].float()[:, :5], batch_size=5))  # type: ignore[arg-type]
    with torch.no_grad():
        return torch.cat([accelerator.gather_for_metrics(model(x)) for x in loader]).sum(1).tolist()


@pytest.mark.parametrize(("engine", "world_size"), LAYOUTS)
def test_evaluation_gives_one_process_s_numbers(engine: str, world_size: int) -> None:
    torch.manual_seed(0)
    results = _run(_evaluation, engine, world_size=world_size)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2)).eval()
    with torch.no_grad():
        expected = plain(_data()[0, 0].float()).sum(1).tolist()
    for result in results:
        assert result == pytest.approx(expected, rel=1e-5, abs=1e-6)  # float32, batches of other sizes
