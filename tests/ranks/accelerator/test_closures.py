"""``optimizer.step(closure)``: the weights of a plain loop, whatever an update is cut into, or an error that says why not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.accelerator.plugins.kwargs_handlers import GradScalerKwargs
from echelon.accelerator.update.optimizer import AcceleratedOptimizer
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import train_prepared
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain
from tests.reference import regression_data, tanh_net

_N, _BATCH, _EPOCHS = 22, 8, 2  # batches of 8, 8 and 6


def _model() -> nn.Module:
    return tanh_net(5, 6, 2, seed=5)


def _data() -> TensorDataset:
    return regression_data(_N, 5, 2)


_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=4),
    "lbfgs, line search": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
    "deaf": lambda m: _Deaf(m.parameters(), lr=0.1),
    "restless": lambda m: _Restless(m.parameters(), lr=0.1),
    "lbfgs, one evaluation": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=1),
}


def _plain(optimizer_of: str) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Return the weights, the loss that each step returned, and the learning rates."""
    model, data = _model(), _data()
    optimizer = _OPTIMIZERS[optimizer_of](model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    losses, rates = [], []
    for _ in range(_EPOCHS):
        for x, y in DataLoader(data, _BATCH):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
                optimizer.zero_grad()
                loss: Any = (model(x) - y).square().mean()
                loss.backward()
                return loss

            found: Any = optimizer.step(closure)
            losses.append(found.item())
            schedule.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return dict(model.state_dict()), losses, rates


def _run(
    optimizer_of: str, engine: str | None, settings: dict[str, Any], clears: str = "closure", accumulates: bool = True
) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if engine == "fsdp2":
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    accelerator = Accelerator(engine=engine, cpu=True, **more, **settings)
    model: Any = _model()
    inner = _OPTIMIZERS[optimizer_of](model)
    schedule: Any = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.9)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, inner, schedule, DataLoader(_data(), batch_size=_BATCH)
    )
    assert isinstance(optimizer, AcceleratedOptimizer)
    losses, rates, update_losses = [], [], []

    def turn(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            if clears in ("closure", "both"):
                optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - y).square().mean()
            accelerator.backward(loss)
            return loss

        if clears in ("before", "both"):
            optimizer.zero_grad()
        found = optimizer.step(closure)
        assert isinstance(found, torch.Tensor)
        schedule.step()
        if clears == "after":
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses.append(found.item())
            rates.append(optimizer.param_groups[0]["lr"])
            update_losses.append(accelerator.update_loss() if accelerator.parity != "off" else found.item())

    for _ in range(_EPOCHS):
        for x, y in loader:
            if accumulates:
                with accelerator.accumulate(model):
                    turn(x, y)
            else:
                turn(x, y)
    weights = accelerator.get_state_dict(model)
    assert accelerator.progress.step == len(losses)
    return {"weights": weights, "losses": losses, "rates": rates, "update_losses": update_losses}


def _expect(found: list[dict[str, Any]], optimizer_of: str, *, tolerance: float = 1e-12) -> None:
    weights, losses, rates = _plain(optimizer_of)
    for rank, one in enumerate(found):
        # float64: sums in another order; AdamW and LBFGS divide by what is small.
        assert one["losses"] == pytest.approx(losses, rel=tolerance)
        assert one["update_losses"] == pytest.approx(losses, rel=tolerance)
        assert one["rates"] == pytest.approx(rates)
        if one["weights"] is None:
            assert rank > 0
            continue
        for name, value in weights.items():
            assert (one["weights"][name] - value).norm() <= tolerance * value.norm(), (rank, name)


_CUTS: list[tuple[str, dict[str, Any], int]] = [
    ("whole", {}, 1),
    ("max_micro_batch_size", {"max_micro_batch_size": 3}, 1),
    ("accumulation", {"gradient_accumulation_steps": 3}, 1),
    ("ranks", {}, 2),
    ("ranks and accumulation", {"gradient_accumulation_steps": 2}, 2),
    ("ranks and max_micro_batch_size", {"max_micro_batch_size": 1}, 3),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("settings", "world_size"), [cut[1:] for cut in _CUTS], ids=[cut[0] for cut in _CUTS])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lbfgs, one evaluation"])
def test_an_update_of_any_split_equals_that_of_the_whole_batch(
    optimizer: str, settings: dict[str, Any], world_size: int
) -> None:
    found = run_on_ranks(_run, optimizer, None, {"parity": "exact", **settings}, world_size=world_size)
    _expect(found, optimizer, tolerance=1e-12 if optimizer == "sgd" else 1e-9)


@pytest.mark.sample(3)
@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("clears", ["closure", "before", "after", "both"])
def test_closures_may_clear_the_gradients_anywhere(clears: str, accumulates: bool) -> None:
    settings = {"parity": "exact", "gradient_accumulation_steps": 2}
    _expect(run_on_ranks(_run, "sgd", None, settings, clears, accumulates), "sgd")


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["zero1", "fsdp2"])
@pytest.mark.parametrize("steps", [1, 2])
def test_sharded_engines_take_closures(engine: str, steps: int) -> None:
    _expect(run_on_ranks(_run, "sgd", engine, {"parity": "exact", "gradient_accumulation_steps": steps}), "sgd")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["lbfgs", "lbfgs, line search"])
def test_an_update_of_one_micro_step_may_be_evaluated_repeatedly(optimizer: str, world_size: int) -> None:
    """The loss that steers LBFGS is that of all ranks: the same decisions, the same number of evaluations."""
    found = run_on_ranks(_run, optimizer, None, {"parity": "exact"}, world_size=world_size)
    _expect(found, optimizer, tolerance=1e-8)


def test_closures_are_bit_identical_on_any_number_of_ranks() -> None:
    settings = {"parity": "bitwise", "canonical_shards": 4, "seed": 1}
    (alone,), two = (run_on_ranks(_run, "sgd", None, settings, world_size=n) for n in (1, 2))
    _expect([alone, *two], "sgd")
    for one in two:
        assert one["losses"] == alone["losses"]
        assert all(torch.equal(value, alone["weights"][name]) for name, value in one["weights"].items())


def test_without_parity_micro_steps_have_equal_weights() -> None:
    program = Program(num_samples=22, batch_size=4, optimizer="momentum", closure=True, accumulation=2)
    require_plain([Case(program=program, layout=Layout(world_size=2))])


# ---- refused by name -------------------------------------------------------------------------------------------------


def _refusal(body: Callable[..., None], optimizer_of: str = "sgd", **settings: Any) -> str:
    handlers = [GradScalerKwargs(init_scale=4.0)] if settings.get("mixed_precision") == "fp16" else []
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **settings)  # type: ignore[arg-type]
    model: Any = _model().float() if handlers else _model()
    optimizer: Any = _OPTIMIZERS[optimizer_of](model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_data(), batch_size=_BATCH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        try:
            for x, y in loader:
                with accelerator.accumulate(model):
                    body(accelerator, model, optimizer, x.to(next(model.parameters()).dtype), y)
        except UsageError as error:
            return str(error)
    return "nothing was refused"


def _closure(accelerator: Any, model: Any, x: Any, y: Any) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        loss: torch.Tensor = (model(x) - y).square().mean()
        accelerator.backward(loss)
        return loss

    return closure


def _once(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.step(_closure(accelerator, model, x, y))


def _only_in_the_last(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    if accelerator.sync_gradients:
        optimizer.step(_closure(accelerator, model, x, y))


def _twice(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.step(_closure(accelerator, model, x, y))
    optimizer.step(_closure(accelerator, model, x, y))


def _of_two_optimizers(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.step(_closure(accelerator, model, x, y))
    if len(accelerator._optimizers) == 1:
        accelerator.prepare(_OPTIMIZERS["sgd"](model))
    accelerator._optimizers[1].step(_closure(accelerator, model, x, y))


def _after_a_backward(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
    accelerator.backward((model(x) - y).square().mean())
    optimizer.step(_closure(accelerator, model, x, y))


class _Deaf(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step()


class _Restless(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][-1].add_(0.5)
        return super().step(closure)


_CUT = {"parity": "exact", "max_micro_batch_size": 2}
_WINDOW = {"gradient_accumulation_steps": 2}
_REFUSALS: list[tuple[Callable[..., None], str, dict[str, Any], str]] = [
    (_once, "lbfgs", _CUT, "LBFGS evaluates its closure again"),
    (_once, "lbfgs", _WINDOW, "LBFGS evaluates its closure again"),
    (_once, "lbfgs", {"parity": "bitwise", "canonical_shards": 1, "seed": 1}, "LBFGS evaluates its closure again"),
    (
        _only_in_the_last,
        "sgd",
        _CUT,
        "in micro-step 4 of an update, but in only 0 of the 3 earlier ones",
    ),
    (
        _only_in_the_last,
        "sgd",
        _WINDOW,
        "in micro-step 2 of an update, but in only 0 of the 1 earlier ones",
    ),
    (_twice, "sgd", _CUT, "a second time in micro-step 1"),
    (_of_two_optimizers, "sgd", _CUT, "another optimizer also evaluated a closure"),
    (_of_two_optimizers, "sgd", _WINDOW, "another optimizer also evaluated a closure"),
    (_after_a_backward, "sgd", _CUT, "both outside and inside the closure passed to SGD"),
    (_once, "deaf", _WINDOW, "_Deaf does not evaluate its closure"),
    (_once, "restless", _WINDOW, "_Restless changes the parameters before it evaluates"),
    (_once, "sgd", {"mixed_precision": "fp16"}, "with fp16 loss scaling"),
]


@pytest.mark.parametrize(
    ("body", "optimizer", "settings", "text"),
    _REFUSALS,
    ids=[f"{body.__name__}-{optimizer}-{'-'.join(settings)}" for body, optimizer, settings, _ in _REFUSALS],
)
def test_undefined_loops_are_rejected_by_name(
    body: Callable[..., None], optimizer: str, settings: dict[str, Any], text: str
) -> None:
    said = _refusal(body, optimizer, **settings)
    assert text in said
    assert "do:" in said


def test_a_closure_that_only_returns_the_loss_is_accepted() -> None:
    """As some loops write it: the backward pass comes before."""

    def body(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> None:
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step(lambda: loss)
        optimizer.zero_grad()

    assert _refusal(body, parity="exact", max_micro_batch_size=2) == "nothing was refused"


# ---- optimizers of two steps -----------------------------------------------------------------------------------------


class _SAM(torch.optim.SGD):
    """Sharpness-aware: climbs, evaluates there, comes back and steps. Source: Foret et al., 2021."""

    def climb(self) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.climb()
        with torch.enable_grad():
            loss = closure()
        return self.come_back(loss)

    def come_back(self, loss: Any = None) -> Any:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.copy_(self.state[p]["old"])
        super().step()
        self.zero_grad()
        return loss


def _sam(by_closure: bool, settings: dict[str, Any]) -> Any:
    accelerator = Accelerator(cpu=True, **settings)
    model: Any = _model()
    model, optimizer, loader = accelerator.prepare(
        model, _SAM(model.parameters(), lr=0.1), DataLoader(_data(), batch_size=_BATCH)
    )
    for x, y in loader:
        with accelerator.accumulate(model):
            closure = _closure(accelerator, model, x, y)
            closure()
            if by_closure:
                optimizer.step(closure)
            else:
                optimizer.climb()
                closure()
                optimizer.come_back()
    return accelerator.get_state_dict(model)


def test_a_two_step_optimizer_matches_the_plain_loop() -> None:
    model, data = _model(), _data()
    optimizer = _SAM(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, _BATCH):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> Any:
            loss: Any = (model(x) - y).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    for weights in run_on_ranks(_sam, True, {"parity": "exact"}):
        for name, value in model.state_dict().items():
            assert (weights[name] - value).norm() <= 1e-12 * value.norm()


def test_steps_hidden_from_the_accelerator_are_rejected_by_name() -> None:
    with pytest.raises(UsageError, match=r"_SAM was stepped directly|earlier micro-steps' gradients were cleared"):
        _sam(False, {"parity": "exact", "max_micro_batch_size": 2})


def _changes(settings: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True, **settings)
    model: Any = _model()
    model, optimizer, loader = accelerator.prepare(model, _OPTIMIZERS["sgd"](model), DataLoader(_data(), _BATCH))
    for x, y in loader:
        train_prepared(accelerator, model, optimizer, [x], loss_of=lambda x, y=y: (model(x) - y).square().mean())
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.5, 0.5)


def test_parameters_that_change_within_an_update_are_reported() -> None:
    with pytest.warns(EchelonWarning, match="changed between two micro-steps of one update"):
        _changes({"parity": "exact", "max_micro_batch_size": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _changes({"parity": "exact"})  # an update is one micro-step
    with pytest.raises(UsageError, match="changed between two micro-steps of one update"):
        _changes({"parity": "bitwise", "canonical_shards": 4, "seed": 1})
