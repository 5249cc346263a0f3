"""The engine deepspeed with layers that an update does not use, and weights that the program changes itself: as a plain loop, or refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.base import environ
from echelon.base.errors import UsageError
from echelon.utils import DeepSpeedPlugin, GatheredParameters
from tests.harness import run_on_ranks, shut_down
from tests.prepared_loop import all_warnings, share_of
from tests.reference import gaussian, mean_square, train_updates

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.deepspeed

LAYERS = "abc"
STAGES = [0, 1, 2, 3]
LAYOUTS = [(0, "none"), (1, "none"), (2, "none"), (3, "none"), (2, "cpu"), (3, "cpu")]
AGAIN = "got no gradients in an earlier update, and is used again now"


class Branches(nn.Module):
    """Adds up the outputs of those layers that a call names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleDict({name: nn.Linear(3, 2) for name in LAYERS})

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum((self.layers[name](x) for name in used), torch.zeros(()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A program: for each update, the layers that it uses."""

    optimizer: str
    used: tuple[str, ...]
    max_norm: float | None
    clamps: tuple[bool, ...]

    @classmethod
    def of(cls, seed: int) -> Drawn:
        draw = random.Random(f"branches {seed}")
        used = tuple("".join(name for name in LAYERS if draw.random() < 0.6) or "a" for _ in range(5))
        return cls(
            optimizer=draw.choice(["sgd", "momentum", "decay", "adamw"]),
            used=used,
            max_norm=draw.choice([None, 0.3]),
            clamps=tuple(draw.random() < 0.3 for _ in used),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
        momentum = 0.9 if self.optimizer != "sgd" else 0.0
        decay = 0.2 if self.optimizer == "decay" else 0.0
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)

    @property
    def comes_back(self) -> bool:
        """Whether an update uses a layer that an earlier one did not use, with an optimizer that counts steps."""
        pairs = [(name, number) for number, used in enumerate(self.used) for name in used]
        late = any(name not in before for name, number in pairs for before in self.used[:number])
        return late and self.optimizer == "adamw"


def _batches() -> torch.Tensor:
    return gaussian(5, 8, 3, dtype=torch.float32)


def _plain(drawn: Drawn) -> dict[str, torch.Tensor]:
    model = Branches()
    optimizer = drawn.build_optimizer(model)
    for x, used, clamps in zip(_batches(), drawn.used, drawn.clamps):
        model(x, used).square().mean().backward()
        if drawn.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), drawn.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if clamps:
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.2, 0.2)
    return model.state_dict()


def _accelerator(stage: int, offload: str = "none", **config: Any) -> Accelerator:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, **config.pop("zero", {})}
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload}
    more = {name: config.pop(name) for name in ("gradient_accumulation_steps",) if name in config}
    config = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "zero_force_ds_cpu_optimizer": False,
        **config,
    }
    return Accelerator(engine="deepspeed", cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **more)


def _train(stage: int, offload: str, seeds: list[int]) -> list[Any]:
    found: list[Any] = []
    for drawn in map(Drawn.of, seeds):
        accelerator = _accelerator(stage, offload)
        model: Any = Branches()
        model, optimizer = accelerator.prepare(model, drawn.build_optimizer(model))
        try:
            for x, used, clamps in zip(_batches(), drawn.used, drawn.clamps):
                accelerator.backward(model(share_of(x), used).square().mean())
                if drawn.max_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), drawn.max_norm)
                optimizer.step()
                optimizer.zero_grad()
                if clamps:
                    with torch.no_grad(), GatheredParameters(list(model.parameters()), modifier_rank=0):
                        for p in model.parameters():
                            p.clamp_(-0.2, 0.2)
            found.append(accelerator.get_state_dict(model))
        except UsageError as error:
            found.append(str(error))
        accelerator.free_memory()
    return found


def _require_plain(stage: int, offload: str, seeds: list[int]) -> None:
    results = run_on_ranks(_train, stage, offload, seeds, world_size=2)
    for rank, of_rank in enumerate(results):
        for seed, found in zip(seeds, of_rank):
            drawn = Drawn.of(seed)
            if stage and drawn.comes_back:
                assert AGAIN in found, (drawn, found)
            elif found is not None or (rank, stage) != (1, 3):
                # float32, sums in another order; updates are about 0.05.
                expected = _plain(drawn)
                assert all(torch.allclose(found[n], expected[n], rtol=1e-5, atol=1e-5) for n in expected), drawn


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "offload"), LAYOUTS)
def test_drawn_programs_with_unused_layers_and_changed_weights_are_plain_loops(stage: int, offload: str) -> None:
    assert {Drawn.of(seed).comes_back for seed in range(10)} == {False, True}
    _require_plain(stage, offload, [*range(10), 11])  # 11: weights are changed after the last step


@pytest.mark.soak
@pytest.mark.parametrize("first", range(10, 110, 20))
@pytest.mark.parametrize(("stage", "offload"), LAYOUTS)
def test_more_drawn_programs(stage: int, offload: str, first: int) -> None:
    _require_plain(stage, offload, list(range(first, first + 20)))


def _use_different_layers(stage: int) -> Any:
    accelerator = _accelerator(stage)
    model: Any = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 3), LAYERS[accelerator.process_index]).sum())
    try:
        optimizer.step()
    except UsageError as error:
        return str(error)
    return accelerator.get_state_dict(model)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_use_different_layers_are_averaged_or_refused(stage: int) -> None:
    for found in run_on_ranks(_use_different_layers, stage, world_size=2):
        if stage:
            assert "some ranks used layers.a.weight, layers.a.bias, layers.b.weight and 1 more parameters" in found
        else:
            before = Branches().state_dict()
            moved = {name: round((before[name] - value).mean().item(), 4) for name, value in found.items()}
            assert moved == {f"layers.{n}.{p}": 0.0 if n == "c" else 0.5 for n in LAYERS for p in ("weight", "bias")}


def _use_layers_in_orders(stage: int, orders: list[str]) -> Any:
    """Use the layers in the order ``orders[rank]`` in the first update, and in one order in the second, except with stage 3."""
    accelerator = _accelerator(stage)
    model: Any = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = share_of(_batches()[0])
    said = None
    for used in (orders[accelerator.process_index], LAYERS)[: 1 if stage == 3 else 2]:  # it keeps to its first order
        accelerator.backward(model(x, used).square().mean())
        try:
            optimizer.step()
        except UsageError as error:
            said = str(error)
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.free_memory()
    return said, state


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_use_layers_in_different_orders_are_averaged_or_refused(stage: int) -> None:
    expected = _plain_loop([[_batches()[0]]] * [2, 2, 1, 0][stage])  # the updates that are not refused
    results = run_on_ranks(_use_layers_in_orders, stage, ["abc", "cab"], world_size=2)
    for said, _ in results:
        assert (stage < 2) == (said is None), said
        assert said is None or "used the model's layers in different orders" in said
    torch.testing.assert_close(dict(results[0][1]), expected, rtol=1e-5, atol=1e-6)  # float32, updates of about 0.05


def _plain_loop(updates: Any, *, also: bool = False) -> Any:
    """Return the state after plain updates; ``also``: with a second loss of each batch."""
    model = Branches()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = mean_square(model(x, LAYERS))
        return loss + mean_square(model(2 * x, "ab")) if also else loss

    return dict(train_updates(model, loss_of, updates, torch.optim.SGD(model.parameters(), lr=0.1)).state)


def _train_alike(stage: int, offload: str = "none", zero: dict[str, Any] | None = None) -> Any:
    accelerator = _accelerator(stage, offload, zero=zero or {})
    model: Any = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in _batches():
        accelerator.backward(model(share_of(x), LAYERS).square().mean())
        optimizer.step()
    return accelerator.get_state_dict(model)


def _require_plain_loop(found: dict[str, torch.Tensor]) -> None:
    expected = _plain_loop([[x] for x in _batches()])
    torch.testing.assert_close(dict(found), expected, rtol=1e-5, atol=1e-6)  # float32, updates of about 0.05


@pytest.mark.slow
def test_what_stage_3_left_in_the_process_of_one_rank_ends_with_its_group() -> None:
    shut_down()  # no rank has used stage 3
    run_on_ranks(_train_alike, 3, world_size=1)  # in the process of rank zero
    _require_plain_loop(run_on_ranks(_train_alike, 2, world_size=2)[0])


@pytest.mark.sample(3)
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("setting", ["overlap_comm", "round_robin_gradients", "parameter_alignment"])
@pytest.mark.parametrize("stage", [1, 2])
def test_settings_for_speed_do_not_change_the_weights(stage: int, setting: str, offload: str) -> None:
    _require_plain_loop(run_on_ranks(_train_alike, stage, offload, {setting: True}, world_size=2)[0])


def _step_without_clipping(stage: int, config: dict[str, float]) -> float:
    with environ.patch({"LOCAL_RANK": None}):  # as in a program that was started without a launcher
        accelerator = _accelerator(stage, **config)
        model: Any = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 2), 10.0)).sum())
    optimizer.step()
    return float(accelerator.get_state_dict(model)["weight"][0, 0])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "config", [{}, {"gradient_clipping": 0.0}, {"gradient_clipping": 1e3}], ids=["absent", "0", "1e3"]
)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_not_clipped_unless_the_config_says_so(stage: int, config: dict[str, float]) -> None:
    assert run_on_ranks(_step_without_clipping, stage, config, world_size=1) == [-10.0]


def _refusals(stage: int) -> list[str]:
    said = []
    accelerator = _accelerator(stage)
    model: Any = Branches()
    try:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.layers["a"].parameters(), lr=1.0))
        accelerator.backward(model(torch.ones(1, 3), LAYERS).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    except UsageError as error:
        said.append(str(error))
    accelerator.free_memory()
    if stage == 3:
        accelerator = _accelerator(stage)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        loss = model(torch.ones(1, 3)).sum()
        accelerator.backward(loss, retain_graph=True)
        with pytest.raises(UsageError) as caught:
            accelerator.backward(loss)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_library_cannot_do_is_refused_by_name(stage: int) -> None:
    (said,) = run_on_ranks(_refusals, stage, world_size=1)
    if stage < 3:
        assert "got 4 parameters that the optimizer does not step" in said[0]
    else:
        assert (
            "layers.b.weight, layers.b.bias, layers.c.weight and others would get gradients, but no optimizer"
            in said[0]
        )
        assert "ZeRO stage 3 releases the weights in each backward pass" in said[1]
    assert len(said) == (2 if stage == 3 else 1)


def _train_groups(stage: int, place: int) -> tuple[list[str], list[torch.Tensor]]:
    """Train with a parameter group without parameters at ``place``, as a model without biases has one."""
    accelerator = _accelerator(stage)
    model: Any = Branches()
    groups: list[dict[str, Any]] = [
        {"params": list(model.layers["a"].parameters()), "lr": 0.1},
        {"params": list(model.layers["b"].parameters()), "lr": 0.2},
    ]
    groups.insert(place, {"params": [], "lr": 7.0})
    model.layers["c"].requires_grad_(False)
    optimizer: Any = torch.optim.SGD(groups)
    rates: list[Any] = [lambda step, k=k: 1 / (1 + step * (k + 1)) for k in range(3)]
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    with all_warnings() as caught:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for x in _batches()[:2]:
        accelerator.backward(model(x, "ab").sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    state: Any = accelerator.get_state_dict(model)
    texts = [str(one.message) for one in caught if "removes parameter groups" in str(one.message)]
    return texts, [Branches().state_dict()[f"layers.{n}.bias"] - state[f"layers.{n}.bias"] for n in "ab"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_schedules_go_on_beside_a_parameter_group_without_parameters(stage: int, place: int) -> None:
    ((texts, moved),) = run_on_ranks(_train_groups, stage, place, world_size=1)
    assert len(texts) == (place < 2)
    # The loss is a sum over 8 samples, so that each bias has the gradient 8 in both updates.
    for lr, k, found in zip((0.1, 0.2), [k for k in range(3) if k != place], moved, strict=True):
        assert found.tolist() == pytest.approx([8 * lr * (1 + 1 / (2 + k))] * 2, rel=1e-5)  # float32


def _freeze_a_group(stage: int) -> str:
    accelerator = _accelerator(stage)
    model: Any = Branches()
    model.layers["a"].requires_grad_(False)
    groups = [{"params": list(model.layers[name].parameters())} for name in LAYERS]
    with pytest.raises(UsageError) as caught:
        accelerator.prepare(model, torch.optim.SGD(groups, lr=0.1))
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_group_of_frozen_parameters_is_refused_by_name(stage: int) -> None:
    (text,) = run_on_ranks(_freeze_a_group, stage, world_size=1)
    assert f"parameter group 0 of the optimizer are frozen, which ZeRO stage {stage} does not support" in text


@pytest.mark.slow
def test_ranks_train_together_after_one_of_their_processes_refused_a_model() -> None:
    shut_down()
    run_on_ranks(_freeze_a_group, 1, world_size=1)  # in the process of rank zero
    _require_plain_loop(run_on_ranks(_train_alike, 2, world_size=2, timeout=20)[0])


def _train_two_losses(stage: int, counts: bool) -> dict[str, torch.Tensor] | None:
    """Call backward() twice in each micro-step; the second window of the pass has one micro-step of two."""
    accelerator = _accelerator(stage, gradient_accumulation_steps=2)
    model: Any = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader: Any = accelerator.prepare(
        DataLoader(list(_batches()[:3].reshape(-1, 3)), batch_size=8 // accelerator.num_processes)
    )
    for x in loader:
        with accelerator.accumulate(model):
            num_items = len(x) if counts else None
            accelerator.backward(model(x, LAYERS).square().mean(), num_items=num_items)
            accelerator.backward(model(2 * x, "ab").square().mean(), num_items=num_items)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.sample(4)
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_each_of_two_losses_has_its_weight_once(stage: int, world_size: int, counts: bool) -> None:
    expected = _plain_loop([_batches()[:2], _batches()[2:3]], also=True)
    found = run_on_ranks(_train_two_losses, stage, counts, world_size=world_size)[0]
    torch.testing.assert_close(dict(found), expected, rtol=1e-5, atol=1e-6)  # float32, updates of about 0.1
