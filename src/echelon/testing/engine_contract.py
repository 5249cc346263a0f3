"""The engine contract: checks for engine authors to run.

Each check is called on every rank in a group, with a function that creates an Accelerator for the engine::

    @pytest.mark.parametrize("check", engine_contract.CHECKS)
    def test_my_engine(check):
        run_on_two_ranks(check, partial(Accelerator, engine=MyEngine))

To run all checks on any number of ranks, without a test runner::

    torchrun --nproc-per-node 2 -m echelon.testing.engine_contract my_engine
"""

from __future__ import annotations

import copy
import math
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from echelon.accelerator.accelerator import Accelerator
from echelon.accelerator.plugins.kwargs_handlers import GradScalerKwargs
from echelon.base.errors import DesyncError, EchelonError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.distributed.operations import broadcast_object_list
from echelon.testing.model_outputs import OUTPUT_KINDS, PlainObject, Returning, items_of
from echelon.world.world import World

Open = Callable[..., Accelerator]
"""Creates an Accelerator for the engine with the given keyword arguments."""
Check = Callable[[Open], None]
"""Raises AssertionError if the engine violates the contract. Collective: call on every rank."""

_SAMPLES = 12  # of all ranks in a micro-step: divisible by 1, 2, 3, 4, 6
_MAX_NORM = 0.05


def trains_like_one_process(open: Open) -> None:
    """Accumulation, clipping, the gradient norm and momentum match SGD in one process, with and without ``num_items=``."""
    for weighted in (False, True):
        accelerator = open(gradient_accumulation_steps=2)
        dtype, tolerance = _precision(accelerator)
        model, optimizer = _prepared(accelerator, _sgd, dtype)
        weights, norms = _model(dtype), []
        plain = _sgd(weights)
        for window in _data(dtype):
            norms.append(_plain_update(weights, plain, window, max_norm=_MAX_NORM))
            for x in window:
                mine = _mine(accelerator, x)
                with accelerator.accumulate(model):
                    accelerator.backward(_loss(model(mine)), num_items=len(mine) if weighted else None)
                    if accelerator.sync_gradients:
                        norm = float(accelerator.clip_grad_norm_(model.parameters(), _MAX_NORM))
                        assert_close(norm, norms[-1], rtol=tolerance, atol=0)
                    optimizer.step()
                    optimizer.zero_grad()
        _expect_weights(accelerator, model, weights, tolerance)


def gradients_are_those_of_one_process(open: Open) -> None:
    """In float32, gradients match to within 1e-6. SGD with a learning rate of one turns them into changes of the weights."""
    accelerator = open()
    model, optimizer = _prepared(accelerator, partial(_sgd, lr=1.0, momentum=0.0), torch.float32)
    weights = _model(torch.float32)
    plain = _sgd(weights, lr=1.0, momentum=0.0)
    for x, _ in _data(torch.float32):
        # Both start each update from the same weights, so that rounding does not accumulate.
        whole = accelerator.get_state_dict(model)
        if whole is not None:
            weights.load_state_dict(whole)
        _plain_update(weights, plain, [x])
        _step(accelerator, model, optimizer, _mine(accelerator, x))
        _expect_weights(accelerator, model, weights, 1e-6)


def trains_in_float32(open: Open) -> None:
    """20 AdamW steps match one process only to within 3e-4, because AdamW divides by small numbers, which amplifies rounding."""
    accelerator = open()
    model, optimizer = _prepared(accelerator, _adamw, torch.float32)
    weights = _model(torch.float32)
    plain = _adamw(weights)
    for _ in range(4):
        for x in _data(torch.float32)[:5, 0]:
            _plain_update(weights, plain, [x], max_norm=1.0)
            accelerator.backward(_loss(model(_mine(accelerator, x))))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    _expect_weights(accelerator, model, weights, 3e-4)


def items_count_alike(open: Open) -> None:
    """If ranks and micro-steps have different numbers of items, including zero, the loss is the mean over the whole update."""
    accelerator = open(gradient_accumulation_steps=2)
    dtype, tolerance = _precision(accelerator)
    model, optimizer = _prepared(accelerator, _sgd, dtype)
    weights = _model(dtype)
    plain = _sgd(weights)
    last = accelerator.num_processes - 1
    uneven = [rank + 1 for rank in range(last + 1)]
    none_on_last = [2 * (rank < max(last, 1)) for rank in range(last + 1)]
    for number, window in enumerate(_data(dtype)[:, :, : 4 * (last + 1)]):
        shares = [none_on_last if number == 3 else uneven, none_on_last]
        _plain_update(weights, plain, [torch.cat([x[: sum(counts)] for x, counts in zip(window, shares)])])
        for x, counts in zip(window, shares):
            mine = x[: sum(counts)].split(counts)[accelerator.process_index].to(accelerator.device)
            with accelerator.accumulate(model):
                _step(accelerator, model, optimizer, mine, num_items=len(mine))
    _expect_weights(accelerator, model, weights, tolerance)


def an_unsynchronised_step_is_synchronised(open: Open) -> None:
    """A step inside ``no_sync`` uses gradients that are synchronized across ranks."""
    accelerator = open()
    dtype, tolerance = _precision(accelerator)
    model, optimizer = _prepared(accelerator, _sgd, dtype)
    weights = _model(dtype)
    plain = _sgd(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)  # the warning is tested elsewhere
        for x, _ in _data(dtype):
            _plain_update(weights, plain, [x])
            with accelerator.no_sync(model):
                _step(accelerator, model, optimizer, _mine(accelerator, x))
    _expect_weights(accelerator, model, weights, tolerance)


def two_models_train(open: Open) -> None:
    """Two models with two optimizers can be trained with one loss, or else preparing them raises an error."""
    accelerator = open()
    dtype, tolerance = _precision(accelerator)
    models = [_model(dtype, seed) for seed in (0, 1)]
    optimizers = [_sgd(model) for model in models]
    if not accelerator.capabilities.supports_multiple_models:
        try:
            accelerator.prepare(*models, *optimizers)
        except EchelonError:
            return
        raise AssertionError(
            f"{accelerator.capabilities.name} prepared two models, but its capabilities say that it does not "
            "support this"
        )
    plain_models = copy.deepcopy(models)
    plain = [_sgd(model) for model in plain_models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    for x, _ in _data(dtype):
        _loss(plain_models[0](x) - plain_models[1](x)).backward()  # type: ignore[no-untyped-call]
        accelerator.backward(_loss(first(_mine(accelerator, x)) - second(_mine(accelerator, x))))
        for optimizer in (*plain, *optimizers):
            optimizer.step()
            optimizer.zero_grad()
    for model, weights in zip((first, second), plain_models):
        _expect_weights(accelerator, model, weights, tolerance)


def its_state_continues_where_it_was(open: Open) -> None:
    """A new model and optimizer continue identically from a checkpoint."""
    accelerator = open()
    dtype, tolerance = _precision(accelerator)

    def steps(model: Any, optimizer: Any) -> None:
        for x, _ in _data(dtype)[:3]:
            _step(accelerator, model, optimizer, _mine(accelerator, x))

    model, optimizer = _prepared(accelerator, _adamw, dtype)
    steps(model, optimizer)
    with TemporaryDirectory() as own:
        folder = _from_rank_zero(own)
        accelerator.save_state(folder)
        at_the_save = copy.deepcopy(accelerator.get_state_dict(model))
        steps(model, optimizer)
        at_the_end = copy.deepcopy(accelerator.get_state_dict(model))
        accelerator.free_memory()
        model, optimizer = _prepared(accelerator, _adamw, dtype)
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()  # before rank zero deletes the folder
    _expect_equal(accelerator.get_state_dict(model), at_the_save, tolerance=0)
    steps(model, optimizer)
    # Bit-identical up to two ranks. With more, a sum depends on the position of a gradient in its bucket, and a fresh model
    # may have different buckets; AdamW's division amplifies the rounding.
    same_bits = accelerator.num_processes < 3
    _expect_equal(accelerator.get_state_dict(model), at_the_end, tolerance=0 if same_bits else 1e3 * tolerance)


def whole_states_leave_and_come_back(open: Open) -> None:
    """Full weights and optimizer states have torch's format, so that plain torch can continue from them."""
    accelerator = open()
    dtype, tolerance = _precision(accelerator)
    capabilities, elsewhere = accelerator.capabilities, accelerator.process_index > 0
    model, optimizer = _prepared(accelerator, _adamw, dtype)
    first, second, third = _data(dtype)[:3, 0]
    for x in (first, second):
        _step(accelerator, model, optimizer, _mine(accelerator, x))
    weights, state = accelerator.get_state_dict(model), optimizer.full_state_dict()
    _expect((weights is None) == (capabilities.shards_parameters and elsewhere), "who has the weights")
    _expect((state is None) == (capabilities.shards_optimizer_state and elsewhere), "who has the optimizer state")
    weights, state = (_from_rank_zero(whole) for whole in (weights, state))

    plain_model = _model(dtype)
    plain_model.load_state_dict(weights)
    plain = _adamw(plain_model)
    plain.load_state_dict(copy.deepcopy(state))
    _plain_update(plain_model, plain, [third])
    _step(accelerator, model, optimizer, _mine(accelerator, third))
    _expect_weights(accelerator, model, plain_model, 1e3 * tolerance)  # AdamW's division amplifies rounding

    optimizer.load_full_state_dict(state)
    back = _from_rank_zero(optimizer.full_state_dict())
    assert_close(back["state"], state["state"], rtol=0, atol=0)


def an_infinite_fp16_step_is_skipped(open: Open) -> None:
    """In fp16, the optimizer and scheduler skip an update with infinite gradients and then continue. Outputs are float32."""
    accelerator = open(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    capabilities = accelerator.capabilities
    models: list[Any] = [_model(torch.float32, seed) for seed in range(1 + capabilities.supports_multiple_models)]
    optimizers: list[Any] = [_sgd(model) for model in models]
    schedulers: list[Any] = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    models, optimizers, schedulers = accelerator.prepare(models, optimizers, schedulers)
    advanced = 0
    for factor in (1.0, float("inf"), 1.0):
        finite = factor == 1.0
        # The loss is infinite on one rank only, but all ranks must skip the update.
        own = factor if accelerator.process_index == accelerator.num_processes - 1 else 1.0
        advanced += finite * accelerator.num_processes  # as in Accelerate, a scheduler advances once per process
        before = [_from_rank_zero(accelerator.get_state_dict(model)) for model in models]
        outputs = [model(torch.ones(3, 5, device=accelerator.device)) for model in models]
        _expect(outputs[0].dtype == torch.float32, f"the output is {outputs[0].dtype}")
        accelerator.backward(torch.stack([_loss(output) for output in outputs]).sum() * own)
        norm = float(accelerator.clip_grad_norm_(models[0].parameters(), 1e6))
        _expect((norm < 100) == finite, f"the norm is {norm}")
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        _expect(accelerator.optimizer_step_was_skipped != finite, "optimizer_step_was_skipped")
        for model, scheduler, earlier in zip(models, schedulers, before):
            now = _from_rank_zero(accelerator.get_state_dict(model))
            moved = any(not torch.equal(earlier[name], now[name]) for name in now)
            _expect(moved == finite, f"weights changed: {moved}, gradients finite: {finite}")
            _expect(scheduler.scheduler.last_epoch == advanced, f"the scheduler is at {scheduler.scheduler.last_epoch}")


def bf16_learns_and_returns_float32(open: Open) -> None:
    """In bf16, matrix products are bf16, outputs are float32, and the loss decreases."""
    accelerator = open(mixed_precision="bf16")
    model, optimizer = _prepared(accelerator, _sgd, torch.float32)
    losses = []
    for _ in range(5):
        loss = _loss(model(torch.ones(3, 5, device=accelerator.device)))
        _expect(loss.dtype == torch.float32, f"the loss is {loss.dtype}")
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    _expect(losses[-1] < losses[0], f"losses {losses}")
    with accelerator.autocast():
        ones = torch.ones(2, 2, device=accelerator.device)
        product = ones @ ones
    _expect(product.dtype == torch.bfloat16, f"autocast computes in {product.dtype}")


def outputs_of_any_kind_train(open: Open) -> None:
    """Outputs of any type lead to the same update, and their types and non-tensor values are preserved."""
    for precision in ("no", "bf16"):
        accelerator = open(mixed_precision=precision)
        dtype, tolerance = _precision(accelerator) if precision == "no" else (torch.float32, math.inf)
        prepared: Any = Returning(_model(dtype), dict)
        inner, plain_model = prepared, _model(dtype)
        prepared, optimizer = accelerator.prepare(prepared, _sgd(prepared))
        plain = _sgd(plain_model)
        x = _data(dtype)[0, 0]
        for kind, make in {**OUTPUT_KINDS, "plain object": PlainObject}.items():
            _plain_update(plain_model, plain, [x])
            inner.make = make
            with warnings.catch_warnings():
                if make is PlainObject:  # its tensors stay bf16, with a warning
                    warnings.simplefilter("ignore", EchelonWarning)
                output = prepared(_mine(accelerator, x))
            like = make(logits=None, hidden=None, note=None, missing=None)
            _expect(
                type(output) is type(like), f"expected the output to be a {kind}, but got a {type(output).__name__}"
            )
            items = items_of(output)
            names = ["logits", "hidden", "note", "missing"][: 3 if kind == "ModelOutput" else 4]
            _expect(list(items) == names, f"{kind}: the items are {list(items)}")
            _expect(items["note"] is inner.note, f"{kind}: a non-tensor was replaced")
            _expect(items.get("missing") is None, f"{kind}: None was replaced")
            if precision == "no" or make is not PlainObject:
                for tensor in (items["logits"], *items["hidden"]):
                    _expect(tensor.dtype == dtype, f"{kind}: a tensor has dtype {tensor.dtype}")
            accelerator.backward(_loss(items["logits"].to(dtype)))
            optimizer.step()
            optimizer.zero_grad()
        weights = accelerator.get_state_dict(prepared)
        if weights is not None:
            weights = {name.removeprefix("inner."): value for name, value in weights.items()}
        _expect_equal(weights, plain_model.state_dict(), tolerance)
        if not accelerator.capabilities.supports_multiple_models:
            accelerator.free_memory()


def evaluation_gives_one_process_s_numbers(open: Open) -> None:
    """Gathered evaluation outputs match those from one process, and contain each sample once."""
    accelerator = open()
    inner = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2))
    for parameter in inner.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=torch.Generator().manual_seed(3))
    samples = _data(torch.float32)[0, 0]
    with torch.no_grad():
        expected = copy.deepcopy(inner).eval()(samples)
        model: Any = accelerator.prepare(inner)
        model.eval()
        loader: Any = accelerator.prepare(DataLoader(samples, batch_size=5))  # type: ignore[arg-type]
        gathered = torch.cat([accelerator.gather_for_metrics(model(x)) for x in loader])
    assert_close(gathered.cpu(), expected, rtol=1e-5, atol=1e-6)  # float32, different batch sizes


def unwrapping_gives_the_user_s_module(open: Open) -> None:
    """``unwrap`` returns the user's module with its original parameter names."""
    accelerator = open()
    model, _ = _prepared(accelerator, _sgd, torch.float32)
    inner = accelerator.session.engine.unwrap(model)
    _expect(isinstance(inner, nn.Sequential), f"unwrapped: {type(inner).__name__}")
    names = [name for name, _ in inner.named_parameters()]
    _expect(names == [name for name, _ in _model(torch.float32).named_parameters()], f"names: {names}")


def exact_parity_holds(open: Open) -> None:
    """With ``parity="exact"``, 17 samples in global batches of 7 lead to the same updates as in one process."""
    accelerator = open(parity="exact")
    dtype, tolerance = _precision(accelerator)
    samples = _data(dtype).flatten(0, 2)[:17]
    model: Any = _model(dtype)
    model, optimizer, loader = accelerator.prepare(model, _sgd(model), DataLoader(samples, batch_size=7))  # type: ignore[arg-type]
    weights = _model(dtype)
    plain = _sgd(weights)
    for _ in range(2):
        for x in samples.split(7):  # type: ignore[no-untyped-call]
            _plain_update(weights, plain, [x], max_norm=_MAX_NORM)
        for x in loader:
            accelerator.backward(_loss(model(x)))
            accelerator.clip_grad_norm_(model.parameters(), _MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    _expect_weights(accelerator, model, weights, tolerance)


def ranks_may_end_at_different_steps(open: Open) -> None:
    """Rank ``r`` runs ``r + 1`` steps inside ``join`` and all ranks then agree, or an error names the rank that ended first."""
    accelerator = open()
    dtype, _ = _precision(accelerator)
    model, optimizer = _prepared(accelerator, _sgd, dtype)
    if not accelerator.capabilities.joins_uneven:
        _expect_the_first_to_end_is_named(accelerator, model, optimizer, dtype)
        return
    with accelerator.session.engine.join([model]):
        for x in _data(dtype).flatten(0, 1)[: accelerator.process_index + 1]:
            _step(accelerator, model, optimizer, x.to(accelerator.device))
    mine = accelerator.get_state_dict(model)
    assert_close(mine, _from_rank_zero(mine), rtol=0, atol=0)


def _expect_the_first_to_end_is_named(accelerator: Accelerator, model: Any, optimizer: Any, dtype: torch.dtype) -> None:
    """Check the error that is raised if the last rank has one batch fewer than the others."""
    n = accelerator.num_processes
    if n == 1:
        return
    loader: Any = accelerator.prepare(DataLoader(_data(dtype).flatten(0, 2)[: 2 * n - 1], batch_size=1))  # type: ignore[arg-type]
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for x in loader:
                _step(accelerator, model, optimizer, x)
    except DesyncError as error:
        _expect(
            f"rank {n - 1} ended" in error.in_english(), f"the error does not name the rank that ended first: {error}"
        )
    else:
        _expect(accelerator.process_index == n - 1, "a rank continued after another rank had ended")


CHECKS: tuple[Check, ...] = (
    trains_like_one_process,
    gradients_are_those_of_one_process,
    trains_in_float32,
    items_count_alike,
    an_unsynchronised_step_is_synchronised,
    two_models_train,
    its_state_continues_where_it_was,
    whole_states_leave_and_come_back,
    an_infinite_fp16_step_is_skipped,
    bf16_learns_and_returns_float32,
    outputs_of_any_kind_train,
    evaluation_gives_one_process_s_numbers,
    unwrapping_gives_the_user_s_module,
    exact_parity_holds,
    ranks_may_end_at_different_steps,
)


# ---- reference: plain PyTorch -----------------------------------------------------------------------------


def _model(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model.to(dtype)


def _sgd(model: nn.Module, *, lr: float = 0.5, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _data(dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of shape [updates, micro-steps, samples on all ranks, features]."""
    data = torch.randn(6, 2, _SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return data.to(dtype)


def _plain_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, window: Iterable[torch.Tensor], *, max_norm: float = math.inf
) -> float:
    """Perform one update with the clipped mean gradient over ``window``, and return the norm before clipping."""
    window = list(window)
    optimizer.zero_grad()
    for x in window:
        (_loss(model(x)) / len(window)).backward()  # type: ignore[no-untyped-call]
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    optimizer.step()
    return norm


# ---- run under test ----------------------------------------------------------------------------------------------------


def _mine(accelerator: Accelerator, x: torch.Tensor) -> torch.Tensor:
    if _SAMPLES % accelerator.num_processes:
        raise UsageError(
            f"{_SAMPLES} samples cannot be divided evenly among {accelerator.num_processes} processes",
            do="run the contract on 1, 2, 3, 4, 6 or 12 processes",
        )
    return x.chunk(accelerator.num_processes)[accelerator.process_index].to(accelerator.device)


def _step(
    accelerator: Accelerator, model: Any, optimizer: Any, x: torch.Tensor, *, num_items: float | None = None
) -> None:
    """Perform an update or a micro-step with this rank's batch ``x``."""
    accelerator.backward(_loss(model(x)), num_items=num_items)
    optimizer.step()
    optimizer.zero_grad()


def _precision(accelerator: Accelerator) -> tuple[torch.dtype, float]:
    """Return the widest dtype that the engine supports, and its relative tolerance."""
    return (torch.float64, 1e-12) if accelerator.capabilities.keeps_float64 else (torch.float32, 1e-5)


def _prepared(
    accelerator: Accelerator, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype
) -> tuple[Any, Any]:
    model = _model(dtype)
    prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer_of(model))
    return prepared


def _from_rank_zero(value: Any) -> Any:
    """Return rank zero's ``value`` on every rank. Collective: call on every rank."""
    (value,) = broadcast_object_list([value])
    return copy.deepcopy(value)


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise AssertionError(f"contract violated: {what}")


def _expect_weights(accelerator: Accelerator, model: Any, plain: nn.Module, tolerance: float) -> None:
    _expect_equal(accelerator.get_state_dict(model), plain.state_dict(), tolerance)


Weights = Mapping[str, torch.Tensor]


def _expect_equal(weights: Weights | None, expected: Weights | None, tolerance: float) -> None:
    """Compare full weights on the ranks that have them, using the norm of the difference relative to the expected norm."""
    if weights is None or expected is None:
        _expect(dist.is_initialized() and dist.get_rank() > 0, "rank zero has no weights")
        return
    _expect(list(weights) == list(expected), f"names are {list(weights)}, not {list(expected)}")
    for name, value in expected.items():
        off = float((weights[name].cpu() - value.cpu()).norm())
        _expect(
            off <= tolerance * float(value.norm()), f"{name} has a relative error of {off / float(value.norm()):.1e}"
        )


def main() -> None:
    """Run every check with the engine named on the command line. Rank zero prints each check that passes."""
    parser = ArgumentParser(prog="python -m echelon.testing.engine_contract", description=main.__doc__)
    parser.add_argument(
        "engine", help="name of an engine, either built into echelon or registered by an installed package"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if accelerators are available")
    arguments = parser.parse_args()
    for check in CHECKS:
        check(partial(Accelerator, engine=arguments.engine, cpu=arguments.cpu))
        if World.current().rank == 0:
            print("passed:", check.__name__, flush=True)


if __name__ == "__main__":
    main()
