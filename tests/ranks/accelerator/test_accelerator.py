"""The Accelerator against plain PyTorch: bit-identical on one process, equal up to rounding on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator, DataLoaderConfiguration, set_seed
from tests.harness import run_on_ranks
from tests.prepared_loop import weights_of
from tests.reference import PlainTraining, gaussian, mean_square, tanh_net, train_plainly, train_updates


def _small() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    set_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = TensorDataset(torch.randn(100, 10), torch.randint(0, 2, (100,)))
    return model, optimizer, scheduler, DataLoader(data, batch_size=8, shuffle=True)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_process_follows_a_plain_loop_bit_for_bit(accumulation: int) -> None:
    model, optimizer, scheduler, loader = _small()
    expected = []
    for _ in range(4):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            expected.append(loss.detach())
            loss = loss * (1 / accumulation) if accumulation > 1 else loss
            loss.backward()
            if (i + 1) % accumulation == 0 or i + 1 == len(loader):
                length = i % accumulation + 1
                if length < accumulation:  # the last window of an epoch is divided by its own length
                    for p in model.parameters():
                        p.grad *= accumulation / length
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]

    model, optimizer, scheduler, loader = _small()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    seen = []
    for _ in range(4):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                seen.append(loss.detach())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert len(seen) >= 50
    assert torch.equal(torch.stack(seen), torch.stack(expected))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))


N, BATCH, FEATURES = 53, 8, 6  # 53 = 6 * 8 + 5


def _exact_setup(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(1)
    model = tanh_net(FEATURES, 16, 3)
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(N, FEATURES, dtype=torch.float64), torch.randint(0, 3, (N,)))
    return model, optimizer, data


def _clip(parameters: Any) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.1)


def _level2(kind: str, accumulation: int) -> PlainTraining:
    model, optimizer, data = _exact_setup(kind)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    found = PlainTraining(accelerator.unwrap_model(model))
    window: list[torch.Tensor] = []
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                window.append(torch.stack([loss.detach() * len(y), torch.tensor(float(len(y)), dtype=torch.float64)]))
                accelerator.backward(loss, num_items=len(y))
                if accelerator.sync_gradients:
                    total, count = accelerator.reduce(torch.stack(window).sum(0), "sum")
                    window = []
                    found.losses.append(float(total / count))
                    found.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                    found.gradients.append([p.grad.clone() for p in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_update_equals_that_of_one_large_batch(kind: str, accumulation: int, world_size: int) -> None:
    model, optimizer, data = _exact_setup(kind)
    x, y = data.tensors
    plain = train_plainly(
        model,
        lambda batch: nn.functional.cross_entropy(model(x[batch]), y[batch]),
        num_samples=N,
        batch_size=BATCH * accumulation,
        optimizer=optimizer,
        epochs=3,
        clip=_clip,
    )
    for found in run_on_ranks(_level2, kind, accumulation, world_size=world_size):
        # float64: sums in another order differ by a few ulp (2e-16) per addition. Adam divides by the root of the second
        # moment, which turns such noise in a gradient near zero into a visible step: 1e-9 on its weights.
        tolerance = 1e-12 if kind == "sgd" else 1e-9
        assert found.losses == pytest.approx(plain.losses, rel=tolerance)
        assert found.norms == pytest.approx(plain.norms, rel=tolerance)
        for mine, expected in zip([*found.gradients, found.weights], [*plain.gradients, plain.weights], strict=True):
            for p, q in zip(mine, expected, strict=True):
                assert (p - q).norm() <= tolerance * q.norm()


def _tokens(counts: list[list[int]], accumulation: int) -> list[torch.Tensor]:
    """Train one update with ``counts[micro_step][rank]`` tokens, possibly none; return the gradients."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = accelerator.prepare(tanh_net(4, 2))
    rank = dist.get_rank()
    everything = gaussian(sum(map(sum, counts)), 4)
    start = 0
    for step_counts in counts:
        first = start + sum(step_counts[:rank])
        x = everything[first : first + step_counts[rank]]
        start += sum(step_counts)
        with accelerator.accumulate(model):
            loss = model(x).square().mean()  # NaN without tokens
            accelerator.backward(loss, num_items=len(x))
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "counts",
    [[[1, 2]], [[2, 10]], [[0, 5]], [[3, 4], [5, 1]], [[0, 3], [2, 0], [1, 1]], [[7, 0], [0, 0]], [[0, 0], [4, 2]]],
)
def test_unequal_token_counts_are_weighted_correctly(counts: list[list[int]]) -> None:
    model = tanh_net(4, 2)
    mean_square(model(gaussian(sum(map(sum, counts)), 4))).backward()
    expected = [p.grad for p in model.parameters()]
    for gradients in run_on_ranks(_tokens, counts, len(counts), world_size=2):
        torch.testing.assert_close(gradients, expected, rtol=1e-13, atol=1e-15)  # float64, a handful of additions


def _two_losses(accumulation: int) -> list[torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    model = accelerator.prepare(tanh_net(4, 2))
    data = gaussian(accumulation, 2, 3, 4)
    for step in range(accumulation):
        x = data[step, dist.get_rank()][: 2 + dist.get_rank()]
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean(), num_items=len(x))
            accelerator.backward(model(x).abs().mean(), num_items=len(x))
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_losses_in_one_micro_step_are_divided_once(accumulation: int) -> None:
    model, data = tanh_net(4, 2), gaussian(accumulation, 2, 3, 4)
    x = torch.cat([data[step, rank][: 2 + rank] for step in range(accumulation) for rank in range(2)])
    (model(x).square().mean() + model(x).abs().mean()).backward()
    expected = [p.grad for p in model.parameters()]
    for gradients in run_on_ranks(_two_losses, accumulation, world_size=2):
        torch.testing.assert_close(gradients, expected, rtol=1e-13, atol=1e-15)


def test_scaling_the_item_counts_does_not_change_the_bits() -> None:
    """Items of 3 and of 3 * 1024 give the same gradients: the scale between them is a power of two."""
    results = []
    for factor in (1, 1024):
        torch.manual_seed(4)
        model = nn.Linear(4, 2)
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(model)
        for x in torch.randn(2, 3, 4):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean(), num_items=3 * factor)
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def _guarded(clears_first: bool) -> torch.Tensor:
    """The loop asks ``sync_gradients`` before it steps, and clears the gradients first or last."""
    model: Any = tanh_net(4, 2)
    accelerator = Accelerator(gradient_accumulation_steps=3)
    data = TensorDataset(gaussian(14, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for (x,) in loader:
        with accelerator.accumulate(model):
            if clears_first:
                optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                optimizer.step()
                if not clears_first:
                    optimizer.zero_grad()
    return weights_of(accelerator, model)[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_before_the_loss_keeps_the_gradients_of_earlier_micro_steps(world_size: int) -> None:
    for first, last in zip(*(run_on_ranks(_guarded, first, world_size=world_size) for first in (True, False))):
        torch.testing.assert_close(first, last, rtol=0, atol=0)
    if world_size == 1:
        model = tanh_net(4, 2)
        windows = zip(gaussian(14, 4).split(6))  # type: ignore[no-untyped-call]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain = train_updates(model, lambda x: mean_square(model(x)), windows, optimizer)
        # float64, sums in another order
        torch.testing.assert_close(first, plain.weights[0], rtol=1e-12, atol=1e-14)
