"""A model whose parameters change after ``prepare`` trains like the same model in one process of plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, DistributedDataParallelKwargs
from echelon.base.errors import DesyncError
from echelon.base.warnings import EchelonWarning
from tests.harness import RanksFailed, errors_on_ranks, run_on_ranks
from tests.prepared_loop import all_warnings, train_prepared
from tests.reference import gaussian, mean_square, tanh_net, train_updates

STEPS = 6


def _model() -> nn.Sequential:
    return tanh_net(6, 5, 5, 1)


def _batches(world_size: int) -> torch.Tensor:
    """Of all ranks: [steps, ranks, samples, features]."""
    return gaussian(STEPS, world_size, 4, 6)


def _mine() -> Iterator[torch.Tensor]:
    return (shares[dist.get_rank()] for shares in _batches(dist.get_world_size()))


def _change(form: str, model: Any, step: int) -> None:
    """Change which parameters of ``model`` train, before the step."""
    if form == "unfrozen":
        model[0].requires_grad_(step >= 2)
    elif form == "frozen":
        model[2].requires_grad_(step < 2)
    elif form == "both":
        model[0].requires_grad_(step >= 2)
        model[2].requires_grad_(step < 2)
    elif form == "one after the other":
        for i in (0, 2, 4):
            model[i].requires_grad_(i == (4, 2, 0)[step // 2])


FORMS = ["unfrozen", "frozen", "both", "one after the other"]


def _plain(form: str) -> dict[str, torch.Tensor]:
    model = _model()
    _change(form, model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = partial(_change, form, model)
    return train_updates(model, lambda x: mean_square(model(x)), _batches(2), optimizer, before=before).state


def _require_close(found: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, weight in (found or {}).items():
        torch.testing.assert_close(weight, expected[name], rtol=tolerance, atol=tolerance)


def _train_changing(accelerator: Accelerator, form: str, bare: nn.Module) -> dict[str, torch.Tensor] | None:
    _change(form, bare, 0)
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.1))
    for step, x in enumerate(_mine()):
        _change(form, bare, step)
        train_prepared(accelerator, model, optimizer, [x])
    return accelerator.get_state_dict(model)


def _changed(engine: str, form: str, options: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    handlers: list[Any] = [DistributedDataParallelKwargs(**options)] if options else []
    return _train_changing(Accelerator(engine=engine, kwargs_handlers=handlers), form, _model())


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("ddp", {}),
        ("ddp", {"static_graph": True}),
        ("ddp", {"find_unused_parameters": True}),
        ("ddp", {"gradient_as_bucket_view": True}),
        ("zero1", {}),
        ("fsdp2", {}),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_layers_may_be_frozen_and_unfrozen(engine: str, options: dict[str, Any], form: str) -> None:
    """float64, AdamW, whose division enlarges rounding: 1e-9."""
    expected = _plain(form)
    for weights in run_on_ranks(_changed, engine, form, options, world_size=2):
        _require_close(weights, expected, 1e-9)


# ---- parameters that are added and replaced ---------------------------------------------------------------------------


def _new_layer(outputs: int) -> nn.Module:
    return nn.Linear(5, outputs).double()


def _rebuild(form: str, model: Any, optimizer: Any) -> None:
    """Replace the head of ``model``, or add a layer."""
    if form == "replaced":
        model[4] = _new_layer(1)
        new = model[4]
    else:
        model.add_module("5", nn.Linear(1, 1).double())
        new = model[5]
    optimizer.add_param_group({"params": list(new.parameters())})


def _plain_rebuilt(form: str) -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def before(step: int) -> None:
        if step == 2:
            torch.manual_seed(100)
            _rebuild(form, model, optimizer)

    return train_updates(model, lambda x: mean_square(model(x)), _batches(2), optimizer, before=before).state


def _rebuilt(engine: str, form: str, parity: str) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
    accelerator = Accelerator(engine=engine, parity=parity, seed=0)
    bare = _model()
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.1))
    rank, said = dist.get_rank(), []
    samples = TensorDataset(_batches(dist.get_world_size()).flatten(0, 2))
    loader: Any = DataLoader(samples, batch_size=4 * dist.get_world_size() if parity != "off" else 4)
    loader = accelerator.prepare(loader)
    with all_warnings() as caught:
        count = 0
        for (x,) in loader:
            if count == 2:
                torch.manual_seed(100 + rank)  # the ranks create different values; rank zero's are used
                _rebuild(form, accelerator.unwrap_model(model), optimizer)
                count += 1
            train_prepared(accelerator, model, optimizer, [x])
            count += accelerator.sync_gradients
        said = [str(w.message) for w in caught]
    return accelerator.get_state_dict(model), said


@pytest.mark.sample(4)
@pytest.mark.parametrize("parity", ["off", "exact", "bitwise"])
@pytest.mark.parametrize("engine", ["ddp", "zero1", "fsdp2"])
@pytest.mark.parametrize("form", ["replaced", "added"])
def test_layers_may_be_added_and_replaced(engine: str, form: str, parity: str) -> None:
    """float64, AdamW: 1e-9."""
    expected = _plain_rebuilt(form)
    results = run_on_ranks(_rebuilt, engine, form, parity, world_size=2)
    for weights, said in results:
        assert (said == []) or engine == "fsdp2"
        _require_close(weights, expected, 1e-9)


def _whole_frozen_model(engine: str, max_norm: float) -> tuple[list[torch.Tensor], list[str]]:
    """A fully frozen model, which DDP rejects, beside a model that trains."""
    accelerator = Accelerator(engine=engine)
    torch.manual_seed(dist.get_rank())  # the ranks have different values; rank zero's are used
    head, body = nn.Linear(6, 1).double(), nn.Linear(6, 6).double().requires_grad_(False)
    held = [*head.parameters(), *body.parameters()]
    first, second, optimizer = accelerator.prepare(head, body, torch.optim.SGD(held, lr=0.1))
    accelerator.unwrap_model(second).requires_grad_(True)
    with all_warnings() as caught:
        for x in _mine():
            accelerator.backward(mean_square(first(second(x))))
            accelerator.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
            optimizer.step()
            optimizer.zero_grad()
    weights = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    return [w.full_tensor() if engine == "fsdp2" else w for w in weights], [str(w.message) for w in caught]


def _plain_frozen_model(max_norm: float) -> list[torch.Tensor]:
    torch.manual_seed(0)
    head, body = nn.Linear(6, 1).double(), nn.Linear(6, 6).double()
    both = nn.ModuleList([head, body])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    clip = partial(nn.utils.clip_grad_norm_, max_norm=max_norm)
    return train_updates(both, lambda x: mean_square(head(body(x))), _batches(2), optimizer, clip=clip).weights


@pytest.mark.parametrize(("engine", "max_norm"), [("ddp", 0.01), ("zero1", 0.01), ("fsdp2", 0.01)])
def test_a_model_prepared_while_frozen_may_be_unfrozen(engine: str, max_norm: float) -> None:
    """float64, SGD: 1e-12; the ranks equal to the bit, also where their own gradients would be clipped by another norm."""
    (first, said), (second, silent) = run_on_ranks(_whole_frozen_model, engine, max_norm, world_size=2)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, _plain_frozen_model(max_norm), rtol=1e-12, atol=1e-12)
    if engine == "fsdp2":
        assert said == []
    else:
        assert len(said) == 1
        assert "that was fully frozen when it was prepared" in said[0]
    assert silent == []


def _only_one_rank_unfreezes() -> None:
    accelerator = Accelerator()
    bare = _model()
    bare[0].requires_grad_(False)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    bare[2].requires_grad_(False)
    if dist.get_rank() == 1:
        bare[0].requires_grad_(True)
    train_prepared(accelerator, model, optimizer, [next(_mine())])


def test_ranks_that_change_different_parameters_are_named() -> None:
    for text in errors_on_ranks(DesyncError, _only_one_rank_unfreezes, world_size=2):
        assert "rank 1 has 0.weight [5, 6] torch.float64 (trainable)" in text


# ---- passes -------------------------------------------------------------------------------------------------------------


def _passes(engine: str, form: str, native: bool) -> tuple[dict[str, torch.Tensor] | None, int]:
    accelerator = Accelerator(engine=engine)
    bare = _model()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    with all_warnings() as caught:
        for x in _mine():

            def backward(loss: torch.Tensor, **options: Any) -> None:
                loss.backward(**options) if native else accelerator.backward(loss, **options)

            if form == "two forward passes, one backward pass":
                backward(mean_square(model(x[:2])) + mean_square(model(x[2:])))
            elif form == "two forward passes, then two backward passes":
                first, second = mean_square(model(x[:2])), mean_square(model(x[2:]))
                backward(first)
                backward(second)
            elif form == "two backward passes of one forward pass":
                out = model(x)
                backward(mean_square(out[:2]), retain_graph=True)
                backward(mean_square(out[2:]))
            else:
                out = checkpoint(model, x[:2].requires_grad_(), use_reentrant=True)
                backward(mean_square(out) + mean_square(model(x[2:])))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model), len([w for w in caught if w.category is EchelonWarning])


def _plain_passes() -> dict[str, torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_updates(
        model, lambda x: mean_square(model(x[:2])) + mean_square(model(x[2:])), _batches(2), optimizer
    ).state


@pytest.mark.sample(3)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        "two forward passes, one backward pass",
        "two forward passes, then two backward passes",
        "two backward passes of one forward pass",
    ],
)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_forward_and_backward_passes_may_come_in_any_order(engine: str, form: str, native: bool) -> None:
    """float64, SGD: 1e-12. DDP reduces one backward pass per forward pass; the step guard reduces the others and warns."""
    expected = _plain_passes()
    for weights, num_said in run_on_ranks(_passes, engine, form, native, world_size=2):
        _require_close(weights, expected, 1e-12)
        assert num_said <= 1
        assert not num_said or "one backward" not in form


def _changed_compiled(form: str) -> dict[str, torch.Tensor] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step guard reduces the step after the change and warns; so does torch
        return _train_changing(Accelerator(dynamo_backend="eager"), form, _model())


@pytest.mark.soak
def test_layers_of_a_compiled_model_may_be_unfrozen_but_not_frozen() -> None:
    """float64, AdamW: 1e-9."""
    expected = _plain("unfrozen")
    for weights in run_on_ranks(_changed_compiled, "unfrozen", world_size=2):
        assert weights is not None
        _require_close(weights, expected, 1e-9)
    # torch raises in the backward pass, before a step; otherwise the step guard raises.
    messages = r"mark a variable ready only once|2 of the 6 trainable parameters received no gradient in the last backward pass: 2.weight, 2.bias"
    with pytest.raises(RanksFailed, match=messages):
        run_on_ranks(_changed_compiled, "frozen", world_size=2)
