"""The contract of all engines. Each engine is listed in ENGINES and passes every check."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.base.capabilities import Capabilities
from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.distributed.setup import cleanup
from echelon.engines.base import Engine
from echelon.engines.delegating_engine import DelegatingEngine
from echelon.engines.registry import ENGINES, default_engine, load_engine
from echelon.testing import engine_contract
from echelon.world.world import World
from tests.counting_engine import CountingEngine, installed
from tests.cpu_data_parallel import cpu_devices
from tests.harness import RanksFailed, run_on_ranks
from tests.prepared_loop import train_prepared

# Arguments of the Accelerator, each with its numbers of ranks.
LAYOUTS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("single", {}, (1,)),
    ("ddp", {}, (1, 2, 3)),
    ("dp", {}, (1,)),
    ("zero1", {}, (2, 3)),
    ("fsdp2", {"reshard_after_forward": True}, (2, 3)),
    ("fsdp2", {"reshard_after_forward": False}, (2, 3)),
    ("fsdp2", {"replicas": 2}, (4,)),
    ("counting", {}, (2,)),
]
# Four ranks cost most: of the hybrid layout these show that it is one; the others are soak, and so is all on three.
OF_HYBRID = {"trains_like_one_process", "gradients_are_those_of_one_process", "its_state_continues_where_it_was"}


def _runs() -> Iterator[Any]:
    for engine, options, world_sizes in LAYOUTS:
        for world_size, check in product(world_sizes, engine_contract.CHECKS):
            is_soak = world_size == 3 or (world_size == 4 and check.__name__ not in OF_HYBRID)
            name = "-".join([engine, *map(str, options.values()), str(world_size), check.__name__])
            yield pytest.param(engine, options, world_size, check, id=name, marks=[pytest.mark.soak] if is_soak else [])


def test_every_registered_engine_is_tested() -> None:
    assert {name for name, *_ in LAYOUTS} == {*ENGINES, "counting"} - {"deepspeed"}  # in test_deepspeed.py


def _open(engine: str, options: dict[str, Any], **settings: Any) -> Accelerator:
    options = dict(options)
    layout = {}
    if replicas := options.pop("replicas", None):
        layout["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=replicas, dp_shard_size=World.current().world_size // replicas
        )
    if options:
        layout["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    accelerator = Accelerator(engine=engine, **layout, **settings)
    assert accelerator.capabilities.name == engine
    return accelerator


def _check(check: engine_contract.Check, engine: str, options: dict[str, Any]) -> None:
    with _around(engine):
        check(partial(_open, engine, options))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "options", "world_size", "check"), [*_runs()])
def test_the_engine_contract(
    engine: str, options: dict[str, Any], world_size: int, check: engine_contract.Check
) -> None:
    run_on_ranks(_check, check, engine, options, world_size=world_size)


@contextmanager
def _around(engine: str) -> Iterator[None]:
    """Set up the environment in which ``engine`` runs."""
    with ExitStack() as stack:
        if engine == "dp":
            stack.enter_context(cpu_devices(2))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "the dp engine copies", EchelonWarning)
        if engine == "counting":
            stack.enter_context(installed())
        yield


def _alone(engine: str) -> None:
    try:
        engine_contract.trains_like_one_process(partial(Accelerator, engine=engine))
    finally:
        cleanup()


@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
def test_distributed_engines_run_in_a_single_process_without_a_group(engine: str) -> None:
    run_on_ranks(_alone, engine, world_size=1, init_group=False)


def test_every_engine_is_final_and_complete() -> None:
    for name in ENGINES:
        engine = load_engine(name)
        assert engine.__bases__ in ((Engine,), (DelegatingEngine,))
        assert not engine.__abstractmethods__


def test_the_default_engine() -> None:
    assert (default_engine(world_size=1), default_engine(world_size=2)) == ("single", "ddp")


def test_the_error_for_an_unknown_engine_suggests_the_closest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ddp'"):
        load_engine("ddq")


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_tpus_are_rejected_with_alternatives(name: str) -> None:
    with pytest.raises(ConfigError, match="does not run on TPUs") as caught:
        Accelerator(engine=name, cpu=True)
    assert "torch.accelerator supports" in str(caught.value)
    assert "entry point 'echelon.engines'" in str(caught.value)


def test_entry_points_register_engines() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'counting'"):
        load_engine("counting")
    with installed():
        assert load_engine("counting") is CountingEngine


def _counted() -> tuple[int, bool]:
    engine = CountingEngine(World.current())
    accelerator = Accelerator(engine=engine, gradient_accumulation_steps=2)
    model: Any = nn.Linear(5, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_prepared(accelerator, model, optimizer, [torch.ones(2, 5)] * 6)
    return engine.num_steps, accelerator.session.engine is engine


def test_an_engine_object_is_accepted() -> None:
    assert run_on_ranks(_counted) == [(3, True)] * 2


# ---- the contract detects errors -----------------------------------------------------------------------------------


class _NeverDivides(CountingEngine):
    def finish_gradients(self, model: nn.Module, factor: float) -> None:
        pass


class _NeverClips(CountingEngine):
    def clip_grad_norm(
        self, parameters: Any, max_norm: float, norm_type: float, *, unsynced: bool = False
    ) -> torch.Tensor:
        return super().clip_grad_norm(parameters, 1e9, norm_type, unsynced=unsynced)


class _HasNoStepGuard(CountingEngine):
    def step(self, optimizer: torch.optim.Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        return super().step(optimizer, closure=closure, unsynced=True)


class _ForgetsTheOptimizer(CountingEngine):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, exposes_state=False)

    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        pass


class _ForgetsTheWholeState(CountingEngine):
    def load_full_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        pass


class _NeverUnwraps(CountingEngine):
    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


class _SkipsNothing(CountingEngine):
    def step(self, optimizer: torch.optim.Optimizer, *, closure: Any = None, unsynced: bool = False) -> bool:
        super().step(optimizer, closure=closure, unsynced=unsynced)
        return True


BROKEN = [
    (_NeverDivides, engine_contract.items_count_alike),
    (_NeverClips, engine_contract.trains_like_one_process),
    (_HasNoStepGuard, engine_contract.an_unsynchronised_step_is_synchronised),
    (_ForgetsTheOptimizer, engine_contract.its_state_continues_where_it_was),
    (_ForgetsTheWholeState, engine_contract.whole_states_leave_and_come_back),
    (_NeverUnwraps, engine_contract.unwrapping_gives_the_user_s_module),
    (_SkipsNothing, engine_contract.an_infinite_fp16_step_is_skipped),
]


def _check_broken(kind: type[CountingEngine], check: engine_contract.Check) -> None:
    def open(**settings: Any) -> Accelerator:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if "mixed_precision" in settings else None
        return Accelerator(engine=kind(World.current(), scaler=scaler), **settings)

    check(open)


@pytest.mark.parametrize(("kind", "check"), BROKEN, ids=lambda value: value.__name__)
def test_the_contract_detects_a_broken_engine(kind: type[CountingEngine], check: engine_contract.Check) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_check_broken, kind, check)
    assert any(isinstance(error, AssertionError) for error in caught.value.errors.values())


@pytest.mark.slow
def test_the_contract_can_be_run_as_a_command() -> None:
    command = [sys.executable, "-m", "echelon.testing.engine_contract", "single", "--cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stdout.splitlines() if line.startswith("passed: ")] == [
        f"passed: {check.__name__}" for check in engine_contract.CHECKS
    ]
