"""The reference of the tests: the samples of each update by formula, plain PyTorch in one process, shared models and datasets.

This module does not import echelon. A *round* is one iteration of the loop on all ranks: a list of indices for each rank
(as in Accelerate), or one list with the whole batch if the update does not depend on the ranks (exact parity).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

Round = list[list[int]]
Losses = Callable[[list[int]], Iterator[tuple[torch.Tensor, "float | None"]]]
"""Maps the samples of one rank in one micro-step to mean losses, each with its number of items (None: samples)."""


def permutation(num_samples: int, *, seed: int, epoch: int) -> list[int]:
    """Return the order of a shuffled epoch, which depends only on (seed, epoch)."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator).tolist()


def batches_of(order: Sequence[int], batch_size: int, *, drop_last: bool = False) -> list[list[int]]:
    """Return consecutive batches of ``order``."""
    batches = [list(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < batch_size else batches


def dealt_batches(
    batches: list[list[int]], *, world_size: int, batch_size: int | None, even: bool, drop_last: bool
) -> list[Round]:
    """Distribute whole batches as Accelerate does: rank r gets the batches r, r + W, ...

    With ``even`` an incomplete last round is filled with samples from the beginning; otherwise some ranks get none. Short batches
    before the last round are given as they are.
    """
    rounds = [batches[i : i + world_size] for i in range(0, len(batches), world_size)]
    if not rounds:
        return rounds
    last = rounds[-1]
    is_whole = len(last) == world_size and (batch_size is None or all(len(batch) == batch_size for batch in last))
    if is_whole or (not even and len(last) == world_size):
        return rounds
    if drop_last and len(last) < world_size:
        return rounds[:-1]
    if not even:
        rounds[-1] = last + [[] for _ in range(world_size - len(last))]
    elif batch_size is None:
        rounds[-1] = [*last, *islice(cycle(rounds[0]), world_size - len(last))]
    else:
        again = cycle([index for batch in rounds[0] for index in batch])
        filled = [[*batch, *islice(again, batch_size - len(batch))] for batch in last]
        rounds[-1] = filled + [list(islice(again, batch_size)) for _ in range(world_size - len(last))]
    return rounds


def cut_batches(batches: list[list[int]], *, world_size: int, batch_size: int, even: bool) -> list[Round]:
    """Split each batch over the ranks (``split_batches``).

    With ``even`` a short last batch is filled from the first one. A short one before it is filled with its own samples, until the
    ranks have equally many; else only if a rank had none.
    """
    rounds: list[Round] = []
    for number, batch in enumerate(batches):
        is_last = number == len(batches) - 1
        if is_last and len(batch) < batch_size and even:
            batch = [*batch, *islice(cycle(batches[0]), batch_size - len(batch))]
        elif not is_last and (even or len(batch) < world_size):
            batch = [*batch, *islice(cycle(batch), -len(batch) % world_size)]
        rounds.append(evenly(batch, world_size))
    return rounds


def evenly(samples: list[int], num_parts: int) -> Round:
    """Split ``samples`` into contiguous parts whose sizes differ by at most one; the first parts are larger."""
    share, extra = divmod(len(samples), num_parts)
    parts, start = [], 0
    for part in range(num_parts):
        size = share + (part < extra)
        parts.append(samples[start : start + size])
        start += size
    return parts


def dispatched_batches(
    batches: list[list[int]], *, world_size: int, even: bool, split: bool, drop_last: bool
) -> list[Round]:
    """Join one batch per rank on rank zero and split the result evenly, filled with samples from the beginning."""
    num_read = 1 if split else world_size
    groups = [batches[i : i + num_read] for i in range(0, len(batches), num_read)]
    if drop_last and groups and len(groups[-1]) < num_read:
        groups.pop()
    whole = [[index for batch in group for index in batch] for group in groups]
    rounds: list[Round] = []
    for samples in whole:
        missing = -len(samples) % world_size
        if missing and even:
            samples = [*samples, *islice(cycle(whole[0][:world_size]), missing)]
        rounds.append(evenly(samples, world_size))
    return rounds


def streamed_batches(
    samples: list[int], *, world_size: int, batch_size: int, even: bool, split: bool, drop_last: bool
) -> list[Round]:
    """Read the stream on every rank; of each group of samples for all ranks, each rank keeps its part."""
    whole = batch_size if split else batch_size * world_size
    groups = batches_of(samples, whole, drop_last=drop_last)
    if groups and len(groups[-1]) < whole and even:
        groups[-1] = [*groups[-1], *islice(cycle(groups[0]), whole - len(groups[-1]))]
    return [evenly(group, world_size) for group in groups]


def sharded_order(order: list[int], *, world_size: int, batch_size: int, even: bool, drop_last: bool) -> list[Round]:
    """Split an order into global batches, and these evenly as ``shard()`` does: each sample once, equal numbers of batches."""
    whole = world_size * batch_size
    groups = batches_of(order, whole, drop_last=drop_last)
    if len(groups) > 1 and len(groups[-1]) < world_size <= whole - world_size:
        moved = world_size - len(groups[-1])
        groups[-2:] = [groups[-2][:-moved], groups[-2][-moved:] + groups[-1]]
    rounds = [evenly(group, world_size) for group in groups]
    if even and rounds:
        start = sum(map(len, groups[:-1]))
        rounds[-1] = [part or [order[(start + rank) % len(order)]] for rank, part in enumerate(rounds[-1])]
    return rounds


@dataclass
class PlainLoop:
    """Plain PyTorch in one process that makes the updates of any number of ranks.

    The loss of an update is the mean of the mean losses over micro-steps and ranks; if the losses have items, it is the mean
    over all items of the window.
    """

    model: nn.Module
    losses: Losses
    optimizers: list[torch.optim.Optimizer]
    schedules: list[Any] = field(default_factory=list)
    schedule_steps: int = 1
    """Number of scheduler steps per update."""
    clip: Callable[[list[nn.Parameter]], Any] | None = None
    """Function that clips the gradients and returns their norm."""
    calls_closure: bool = False
    found_losses: list[float] = field(default_factory=list)
    found_norms: list[float] = field(default_factory=list)
    found_rates: list[float] = field(default_factory=list)
    updates: list[list[int]] = field(default_factory=list)
    """Samples of each update."""

    def update(self, window: list[Round], *, steps: bool = True) -> None:
        """Make one update. ``steps``: False if the loop drops it after its gradients have been clipped."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.updates.append(sorted(index for round_ in window for piece in round_ for index in piece))
        if self.calls_closure:
            for optimizer in self.optimizers:
                optimizer.step(lambda: self._backward(window))  # type: ignore[arg-type,return-value]
        else:
            self.found_losses.append(float(self._backward(window)))
            if self.clip is not None:
                self.found_norms.append(float(self.clip(list(self.model.parameters())) or 0.0))
            if not steps:
                return
            for optimizer in self.optimizers:
                optimizer.step()
        for schedule in self.schedules:
            for _ in range(self.schedule_steps):
                schedule.step()
        self.found_rates.append(float(self.optimizers[0].param_groups[-1]["lr"]))

    def _backward(self, window: list[Round]) -> torch.Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        weighted: list[tuple[torch.Tensor, float]] = []  # losses and weights
        items = 0.0
        for round_ in window:
            for piece in round_:
                for loss, count in self.losses(piece):
                    if count is None:
                        weighted.append((loss, 1 / (len(window) * len(round_))))
                    elif count:
                        items += count
                        weighted.append((loss * count, 1.0))
        total = sum((loss * weight for loss, weight in weighted), torch.zeros(()))
        total = total / items if items else total
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        else:  # no items: the gradients are zero, and the optimizer steps
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        return total.detach()


def warmup_then_linear(peak: float, *, warmup: int, total: int) -> Callable[[int], float]:
    """Return the learning rate of each step: linear to ``peak`` in ``warmup`` steps, then linear to zero at step ``total``."""
    return lambda step: peak * (step / warmup if step < warmup else max(0.0, (total - step) / (total - warmup)))


@dataclass
class PlainTraining:
    """Results of a plain loop for each update, and the trained model."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    """The gradients of each update, after clipping."""

    @property
    def weights(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return [parameter.detach() for parameter in self.model.parameters()]

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers by name."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}


def train_updates(
    model: nn.Module,
    loss_of: Callable[[Any], torch.Tensor | None],
    updates: Iterable[Sequence[Any]],
    optimizer: torch.optim.Optimizer,
    *,
    rate: Callable[[int], float] | None = None,
    schedule: Any = None,
    clip: Callable[[Iterator[nn.Parameter]], Any] | None = None,
    before: Callable[[int], None] | None = None,
) -> PlainTraining:
    """Train in one process; each update takes the mean of ``loss_of`` over its micro-batches.

    Args:
        model: trained in place.
        loss_of: the mean loss of a micro-batch; None: the micro-batch has no items, and its gradient is zero.
        updates: the micro-batches of each update, over all ranks and micro-steps.
        optimizer: of the parameters of ``model``.
        rate: the learning rate of each step; None: that of ``optimizer``.
        schedule: a learning rate schedule that advances after each step.
        clip: clips the gradients before each step, and returns their norm.
        before: is called with the number of each update before it begins.
    """
    found = PlainTraining(model)
    for number, window in enumerate(updates):
        if before is not None:
            before(number)
        optimizer.zero_grad()
        total, is_trained = 0.0, False
        for batch in window:
            loss = loss_of(batch)
            if loss is not None:
                loss = loss / len(window)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
                is_trained = True
        if not is_trained:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(number)
        if clip is not None:
            found.norms.append(float(clip(model.parameters())))
        found.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        found.losses.append(total)
        found.rates.append(float(optimizer.param_groups[0]["lr"]))
        if schedule is not None:
            schedule.step()
    return found


def train_plainly(
    model: nn.Module,
    loss_of: Callable[[list[int]], torch.Tensor | None],
    *,
    num_samples: int,
    batch_size: int,
    optimizer: torch.optim.Optimizer,
    epochs: int = 1,
    seed: int | None = None,
    accumulation: int = 1,
    drop_last: bool = False,
    **options: Any,
) -> PlainTraining:
    """Train in one process over batches of the samples ``0 ... num_samples - 1``.

    Args:
        model: model to train in place.
        loss_of: returns the mean loss of a batch, or None if its samples have no items (zero gradient).
        num_samples: number of samples per epoch.
        batch_size: batch size over all ranks.
        optimizer: optimizer of the parameters of ``model``.
        epochs: number of passes over the samples.
        seed: each epoch has the order ``permutation(seed, epoch)``; None: sequential order.
        accumulation: batches per update; the loss is the mean over them.
        drop_last: skip a short last batch.
        **options: options of ``train_updates``.
    """
    made: list[list[int]] = []

    def updates() -> Iterator[list[list[int]]]:
        for epoch in range(epochs):
            torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws the seed of its workers
            order = range(num_samples) if seed is None else permutation(num_samples, seed=seed, epoch=epoch)
            batches = batches_of(order, batch_size, drop_last=drop_last)
            for start in range(0, len(batches), accumulation):
                window = batches[start : start + accumulation]
                made.append([index for batch in window for index in batch])
                yield window

    found = train_updates(model, loss_of, updates(), optimizer, **options)
    found.batches = made
    return found


# ---- models ----------------------------------------------------------------------------------------------------------


def tanh_net(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return linear layers of the given widths with ``Tanh`` between them."""
    torch.manual_seed(seed)
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def dropout_net(
    inputs: int, hidden: int, outputs: int, *, p: float = 0.3, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """Return two linear layers with dropout between them, from the random state of the caller."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Dropout(p), nn.Linear(hidden, outputs)).to(dtype)


class EmbeddingSum(nn.Module):
    """A linear layer plus an embedding with sparse gradients; returns the mean square, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 3, dtype=torch.float64)
        self.embedding = nn.Embedding(5, 3, sparse=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return mean_square(self.layer(x) + self.embedding(ids))

    @staticmethod
    def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of ``rank``."""
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(4, 2, generator=generator, dtype=torch.float64), torch.randint(5, (4,), generator=generator)


def mean_square(outputs: torch.Tensor) -> torch.Tensor:
    """Return a loss without labels."""
    return outputs.square().mean()


# ---- data ------------------------------------------------------------------------------------------------------------


def gaussian(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return normally distributed numbers, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def regression_data(n: int, inputs: int, outputs: int, *, seed: int = 1) -> TensorDataset:
    """Return ``n`` samples of inputs and targets in float64."""
    return TensorDataset(*gaussian(n, inputs + outputs, seed=seed).split([inputs, outputs], dim=1))


class Numbers(Dataset[torch.Tensor]):
    """0 ... n - 1 by index; ``read`` lists the samples read in this process."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(int(index))
        return torch.tensor(index)


class NumberStream(IterableDataset[torch.Tensor]):
    """0 ... n - 1 in sequence; each loader worker reads its own part, and ``num_read`` counts the samples read."""

    epoch = 0

    def __init__(self, n: int) -> None:
        self.n = n
        self.num_read = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for i in range(self.n) if info is None else range(info.id, self.n, info.num_workers):
            self.num_read += 1
            yield torch.tensor(i + 100 * self.epoch)


class EpochStream(NumberStream):
    """A ``NumberStream`` plus 100 times the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def saved_weights(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return the weights in all safetensors files of ``folder``; the stages of a pipeline have separate ones."""
    return {
        name: value for path in sorted(Path(folder).glob("*.safetensors")) for name, value in load_file(path).items()
    }
