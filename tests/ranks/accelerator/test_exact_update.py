"""``parity="exact"`` in loops as people write them: the numbers are those of a plain loop over whole batches."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, set_seed
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings, weights_of
from tests.programs.program import Case, Layout, Program, draw_case
from tests.programs.runner import check_cases, require_plain
from tests.reference import dropout_net, mean_square, regression_data, tanh_net, train_plainly, train_updates

_SEED = 11
_EPOCHS = 2


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _data(n: int) -> TensorDataset:
    return regression_data(n, 5, 3, seed=n)


# ---- loops -----------------------------------------------------------------------------------------------------------

_PROGRAMS = [  # a program, and the samples of a micro-batch
    (Program(), 2),
    (Program(clears_first=True), 2),
    (Program(clears_first=True, accumulates=False), 2),
    (Program(clears_first=True, guards=True), 2),
    (Program(accumulates=False), 1),
    (Program(accumulation=3, set_to_none=False), None),
    (Program(accumulation=3, set_to_none=False, clears_first=True), None),
    (Program(accumulation=2, guards=True), None),
    (Program(accumulation=2, reads=True), None),
    (Program(clipping="value"), 1),
    (Program(clipping="inf"), 1),
    (Program(accumulation=20, batch_size=7), None),  # more micro-steps than samples
    (Program(num_samples=5, batch_size=1), None),
    (Program(num_samples=5, batch_size=1, optimizer="adamw", loss="items"), None),
    (Program(num_samples=13, batch_size=3, loss="items", accumulation=2), None),
    (Program(accumulation=2, loss="two"), None),
    (Program(accumulation=2, loss="two", clears_first=True), None),
    (Program(model="branches", batch_size=3, optimizer="adamw"), None),
    (Program(model="branches", batch_size=3, accumulation=2), None),
    (Program(model="branches", num_samples=7, batch_size=1, optimizer="adamw"), None),
    (Program(collate="padded", loss="items", accumulation=2), None),
]


def _cases(world_size: int, engine: str | None = None) -> list[Case]:
    """Return the programs with more samples than their defaults, clipping, momentum and a shuffle, where they say nothing else."""
    usual = {"num_samples": 21, "batch_size": 8, "clipping": "norm", "optimizer": "momentum", "order": "shuffle"}
    plain = Program()
    cases = []
    for program, max_micro in _PROGRAMS:
        changes: Any = {name: value for name, value in usual.items() if getattr(program, name) == getattr(plain, name)}
        layout = Layout(world_size=world_size, parity="exact", engine=engine, max_micro=max_micro)
        cases.append(Case(program=replace(program, seed=_SEED, **changes), layout=layout))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "engine"),
    [
        *((1, None), (3, None), (3, "fsdp2 stage 3")),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in [(2, None), (4, None), (2, "fsdp2 stage 2")]),
    ],
)
def test_every_loop_variant_makes_the_update_of_the_whole_batch(world_size: int, engine: str | None) -> None:
    require_plain(_cases(world_size, engine))


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_random_loops_make_the_updates_of_the_whole_batches(count: int) -> None:
    """On 1 to 3 processes; some are refused by name."""
    drawn = (draw_case(seed) for seed in itertools.count(100_000))
    cases = itertools.islice(
        (case for case in drawn if case.layout.parity == "exact" and case.layout.level == 2), count
    )
    report = check_cases(list(cases))
    assert not report.failures, str(report)


# ---- two models ------------------------------------------------------------------------------------------------------


def _pair() -> tuple[list[nn.Module], list[Any]]:
    models: list[nn.Module] = [tanh_net(3, 6, 5), tanh_net(5, 6, 1, seed=1)]
    return models, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def _real_and_fake(models: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    generator, critic = models
    x, y = batch
    return critic(x), critic(generator(y).detach())


def _adversarial(n: int, batch_size: int, accumulation: int = 1) -> list[torch.Tensor]:
    """A critic and a generator in turns, each backward pass followed by the step of its own optimizer."""
    accelerator = Accelerator(parity="exact", gradient_accumulation_steps=accumulation)
    models, optimizers = _pair()
    loader: Any = DataLoader(_data(n), batch_size=batch_size)
    models, optimizers, loader = accelerator.prepare(models, optimizers, loader)
    generator, critic = models
    for _ in range(_EPOCHS):
        for batch in loader:
            optimizers[1].zero_grad()
            real, fake = _real_and_fake(models, batch)
            accelerator.backward((real - 1).square().mean() + fake.square().mean())
            optimizers[1].step()
            optimizers[0].zero_grad()
            accelerator.backward((critic(generator(batch[1])) - 1).square().mean())
            optimizers[0].step()
    return [weight for model in models for weight in weights_of(accelerator, model)]


def _plain_adversarial(n: int, batch_size: int) -> list[torch.Tensor]:
    models, optimizers = _pair()
    generator, critic = models
    data = _data(n)
    for _ in range(_EPOCHS):
        for indices in torch.arange(n).split(batch_size):
            batch = data[indices]
            optimizers[1].zero_grad()
            real, fake = _real_and_fake(models, batch)
            ((real - 1).square().mean() + fake.square().mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (critic(generator(batch[1])) - 1).square().mean().backward()
            optimizers[0].step()
    return [p.detach() for model in models for p in model.parameters()]


def _separate(clears_first: bool) -> list[torch.Tensor]:
    """Two models that do not know of each other, trained in one loop, in several micro-steps."""
    accelerator = Accelerator(parity="exact", gradient_accumulation_steps=2)
    models, optimizers = _pair()
    loader: Any = DataLoader(_data(9), batch_size=4)
    models, optimizers, loader = accelerator.prepare(models, optimizers, loader)
    for _ in range(_EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(*models):
                for model, optimizer, inputs in zip(models, optimizers, (y, x)):
                    if clears_first:
                        optimizer.zero_grad()
                    accelerator.backward(model(inputs).square().mean())
                    optimizer.step()
                    if not clears_first:
                        optimizer.zero_grad()
    return [weight for model in models for weight in weights_of(accelerator, model)]


def _plain_separate() -> list[torch.Tensor]:
    models, optimizers = _pair()
    x, y = _data(9).tensors
    for model, optimizer, inputs in zip(models, optimizers, (y, x)):
        train_plainly(
            model,
            lambda batch, model=model, inputs=inputs: mean_square(model(inputs[batch])),  # type: ignore[misc]
            num_samples=9,
            batch_size=4,
            optimizer=optimizer,
            epochs=_EPOCHS,
        )
    return [p.detach() for model in models for p in model.parameters()]


def _pairs() -> list[list[torch.Tensor]]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="a second loss for the same batch was computed after", category=EchelonWarning
        )
        return [_adversarial(9, 4), _adversarial(3, 1), _separate(True), _separate(False)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_models_with_two_optimizers_are_updated_like_on_one_process(world_size: int) -> None:
    expected = [_plain_adversarial(9, 4), _plain_adversarial(3, 1), _plain_separate(), _plain_separate()]
    for found in run_on_ranks(_pairs, world_size=world_size):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_second_loss_after_an_optimizer_step_warns_once_with_accumulation() -> None:
    with pytest.warns(EchelonWarning, match="it uses their old values") as caught:
        _adversarial(9, 4, accumulation=2)
    assert len(caught) == 1


def _cleared_between(*, max_micro_batch_size: int | None) -> None:
    accelerator = Accelerator(parity="exact", max_micro_batch_size=max_micro_batch_size)
    model, other = accelerator.prepare(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in accelerator.prepare(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)):
        with accelerator.accumulate(model, other):
            accelerator.backward(other(model(x)).mean())
            optimizer.zero_grad()
            accelerator.backward(model(x).mean())
            optimizer.step()


def test_clearing_between_two_losses_warns_once_where_it_has_no_effect() -> None:
    with pytest.warns(EchelonWarning, match=r"zero_grad\(\) between two losses of a batch has no effect") as caught:
        _cleared_between(max_micro_batch_size=2)
    assert len(caught) == 1
    _cleared_between(max_micro_batch_size=None)  # has an effect, and warns of nothing


# ---- ranks without items ---------------------------------------------------------------------------------------------


def _without_items(form: str) -> list[torch.Tensor]:
    """One update; rank one has no item, and says so in one of the ways that people found."""
    accelerator = Accelerator(parity="exact", gradient_accumulation_steps=2)
    torch.manual_seed(1)
    model: Any = nn.Linear(2, 1).double()
    x = torch.arange(16, dtype=torch.float64).reshape(8, 2)
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0], dtype=torch.float64)
    model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, mask), batch_size=8))
    for rows, valid in loader:
        with accelerator.accumulate(model):
            items = float(valid.sum())
            error = model(rows)[:, 0].square()
            loss = (error * valid).sum() / valid.sum()  # NaN where there is none
            if form == "constant" and not items:
                loss = torch.zeros((), dtype=torch.float64, requires_grad=True)
            accelerator.backward(loss, num_items=items)
    return [p.grad for p in model.parameters()]


def test_a_rank_without_items_does_not_change_the_gradient() -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 1).double()
    model(torch.arange(16, dtype=torch.float64).reshape(8, 2)[[0, 1, 3]]).square().mean().backward()
    for form in ("NaN", "constant"):
        for gradients in run_on_ranks(_without_items, form):
            torch.testing.assert_close(gradients, [p.grad for p in model.parameters()], rtol=1e-12, atol=0)


# ---- one rank, one micro-batch ---------------------------------------------------------------------------------------


def _small(kind: str) -> tuple[Any, Any, Any, TensorDataset]:
    set_seed(3)
    model = dropout_net(5, 8, 3)
    optimizer = _optimizer(kind, model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, epochs=_EPOCHS, steps_per_epoch=3)
    return model, optimizer, scheduler, TensorDataset(torch.randn(21, 5), torch.randn(21, 3))


def _end(model: nn.Module, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    state = optimizer.state_dict()["state"]
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "state": [value.clone() for entry in state.values() for value in entry.values() if value is not None],
    }


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_one_rank_with_one_micro_batch_is_bit_identical_to_plain_pytorch(kind: str) -> None:
    model, optimizer, scheduler, data = _small(kind)
    expected = train_plainly(
        model,
        lambda batch: (model(data[batch][0]) - data[batch][1]).square().mean(),
        num_samples=21,
        batch_size=8,
        optimizer=optimizer,
        epochs=_EPOCHS,
        seed=3,
        schedule=scheduler,
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
    )
    weights = _end(model, optimizer)

    model, optimizer, scheduler, data = _small(kind)
    accelerator = Accelerator(parity="exact")
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses, norms, rates = [], [], []
    for _ in range(_EPOCHS):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            losses.append(accelerator.update_loss())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert (losses, norms, rates) == (expected.losses, expected.norms, expected.rates)
    for name, values in _end(model, optimizer).items():
        assert len(values) == len(weights[name])
        assert all(map(torch.equal, values, weights[name])), name


# ---- what an update costs --------------------------------------------------------------------------------------------


def _collectives(parity: str, *, accumulation: int, weighted: bool) -> list[int]:
    """Return how many collectives of any kind, DDP's included, there were in each micro-step of one epoch."""
    accelerator = Accelerator(parity=parity, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    model: Any = nn.Linear(5, 3).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(_data(32), batch_size=8 if parity == "exact" else 8 // 2 // accumulation)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    group: Any = dist.group.WORLD
    counts = []
    before = None
    for x, y in loader:
        if before is None:  # not what the beginning of a pass costs
            before = group._get_sequence_number_for_group()
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss, num_items=x.size(0) if weighted else None)
            optimizer.step()
            optimizer.zero_grad()
        counts.append(group._get_sequence_number_for_group() - before)
        before += counts[-1]
    return counts


@pytest.mark.slow
def test_an_update_costs_one_small_reduction_with_items_and_none_without() -> None:
    for accumulation in (1, 2):
        for rank in range(2):
            plain, by_samples, by_items = (
                run_on_ranks(_collectives, parity, accumulation=accumulation, weighted=weighted)[rank]
                for parity, weighted in (("off", False), ("exact", False), ("exact", True))
            )
            assert len(plain) == 4 * accumulation
            assert by_samples == plain
            extra = [mine - theirs for mine, theirs in zip(by_items, plain)]
            # Once: the scale near which items are counted is agreed, where there are several micro-steps.
            assert extra == ([1, 1, 1, 1] if accumulation == 1 else [1, 1, 0, 1, 0, 1, 0, 1])


# ---- fp16 ------------------------------------------------------------------------------------------------------------

_TOKENS = 2000


def _sequences(num_sequences: int) -> TensorDataset:
    g = torch.Generator().manual_seed(4)
    return TensorDataset(
        torch.randn(num_sequences, _TOKENS, 4, generator=g), torch.randn(num_sequences, _TOKENS, generator=g)
    )


def _tagger() -> tuple[Any, Any, Any]:
    torch.manual_seed(2)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _plain_tagger(num_sequences: int, batch_size: int) -> list[torch.Tensor]:
    """In float32, without scaling."""
    model, optimizer, scheduler = _tagger()
    x, y = _sequences(num_sequences).tensors
    plain = train_plainly(
        model,
        lambda batch: (model(x[batch])[..., 0] - y[batch]).square().mean(),
        num_samples=num_sequences,
        batch_size=batch_size,
        optimizer=optimizer,
        schedule=scheduler,
    )
    return plain.weights


def _half_tagger(num_sequences: int, batch_size: int, accumulation: int, overflows_at: int | None) -> dict[str, Any]:
    accelerator = Accelerator(parity="exact", mixed_precision="fp16", gradient_accumulation_steps=accumulation)
    assert accelerator.scaler is not None
    model, optimizer, scheduler = _tagger()
    loader: Any = DataLoader(_sequences(num_sequences), batch_size=batch_size)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    rates, skipped, norms = [], [], []
    for micro_step, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = (model(x)[..., 0] - y).square().mean()
            if micro_step == overflows_at and accelerator.process_index == 0:
                loss = loss * 1e30
            accelerator.backward(loss, num_items=y.numel())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                norms.append(norm.item())
                rates.append(scheduler.get_last_lr()[0])
                skipped.append(accelerator.optimizer_step_was_skipped)
    return {
        "weights": weights_of(accelerator, model), "rates": rates, "skipped": skipped, "norms": norms,
        "scale": accelerator.scaler.get_scale(), "steps": accelerator.progress.step,
    }  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
def test_fp16_does_not_overflow_with_thousands_of_items(world_size: int) -> None:
    for num_sequences, batch_size, accumulation in ((8, 4, 1), (8, 4, 2), (9, 4, 2), (2, 1, 1)):
        expected = _plain_tagger(num_sequences, batch_size)
        updates = -(-num_sequences // batch_size)
        for found in run_on_ranks(_half_tagger, num_sequences, batch_size, accumulation, None, world_size=world_size):
            assert found["skipped"] == [False] * updates
            assert found["scale"] == 65536.0  # where it began
            # fp16 has 11 bits (5e-4); outputs, their gradients and the weights' are each rounded once.
            torch.testing.assert_close(found["weights"], expected, rtol=2e-3, atol=1e-3)


def test_a_step_skipped_by_fp16_on_one_rank_is_skipped_on_all_ranks() -> None:
    for found in run_on_ranks(_half_tagger, 12, 4, 2, 2):  # the first micro-step of the second update
        assert found["skipped"] == [False, True, False]
        assert found["rates"] == [0.5 / 2, 0.5 / 2, 0.5 / 3]
        assert (found["steps"], found["scale"]) == (2, 32768.0)
        assert [math.isfinite(norm) for norm in found["norms"]] == [True, False, True]


X = torch.arange(64.0, dtype=torch.float64).reshape(32, 2).sin()


def _model() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.5)
    return model


def _plain(batches: list[torch.Tensor]) -> torch.Tensor:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train_updates(model, lambda x: mean_square(model(x)), [[x] for x in batches], optimizer).weights[0]


def _prepared(
    loop: Callable[[Accelerator, Any, Any, Any], None], micro: int | None = 4
) -> tuple[torch.Tensor, list[str]]:
    accelerator = Accelerator(cpu=True, parity="exact", max_micro_batch_size=micro)
    model = _model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(X), batch_size=16)
    )
    with all_warnings() as caught:
        loop(accelerator, model, optimizer, loader)
    return accelerator.unwrap_model(model).weight.detach().clone(), [str(one.message) for one in caught]


def _step(accelerator: Accelerator, model: Any, optimizer: Any, x: Any) -> None:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _leaves_at_the_last_micro_batch(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        if accelerator.progress.samples_seen == 32 and accelerator.sync_gradients:  # the second update's last one
            break
        _step(accelerator, model, optimizer, x)
    for (x,) in loader:
        _step(accelerator, model, optimizer, x)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_an_update_left_at_its_last_micro_batch_are_dropped(world_size: int) -> None:
    expected = _plain([X[:16], X[:16], X[16:]])
    ranks = run_on_ranks(_prepared, _leaves_at_the_last_micro_batch, world_size=world_size)
    for weight, _ in ranks:
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)  # float64, sums in another order
    assert any("a loop ended in the middle of an update with several micro-steps" in text for text in ranks[0][1])


def _updates_after_the_loop(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for (x,) in loader:
        with accelerator.accumulate(model):
            _step(accelerator, model, optimizer, x)
    with accelerator.accumulate(model):
        _step(accelerator, model, optimizer, X[16:])


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_after_the_loop_counts_whole(world_size: int) -> None:
    expected = _plain([X[:16], X[16:], X[16:]])
    for weight, _ in run_on_ranks(_prepared, _updates_after_the_loop, None, world_size=world_size):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)


def _reads_one_piece(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    (x,) = next(iter(loader))
    _step(accelerator, model, optimizer, x)


def test_a_piece_of_a_batch_whose_iterator_is_closed_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"next\(iter\(loader\)\)"):
        _prepared(_reads_one_piece)


def _steps_in_the_first_micro_step(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in range(2):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            if accelerator.progress.micro_step == 1:
                optimizer.step()


def _guards_its_steps(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in range(2):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()


def test_a_step_that_never_comes_is_a_warning() -> None:
    _, texts = _prepared(_steps_in_the_first_micro_step)
    assert [text for text in texts if "was called in an earlier micro-step" in text] != []
    for loop in (_guards_its_steps, lambda a, m, o, batches: [_step(a, m, o, x) for (x,) in batches]):
        weight, texts = _prepared(loop)
        assert texts == []
    torch.testing.assert_close(weight, _plain([X[:16], X[16:]]), rtol=1e-12, atol=0)
