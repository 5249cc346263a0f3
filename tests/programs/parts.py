"""The parts of a drawn program in plain PyTorch: data, model, losses, optimizers, schedules. Nothing of echelon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from tests.programs.program import Program

LENGTH, WIDTH = 3, 3
HALF = 0.5


class Batch(NamedTuple):
    """The tensors of some samples: [b], [b, t, 3], [b, t], [b, t], [b]."""

    index: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor
    token: torch.Tensor


class Rows(Dataset[Any]):
    """Sequences, of which some positions count; some samples have none that do."""

    def __init__(self, program: Program, *, num_samples: int | None = None, seed: int = 0) -> None:
        n = program.num_samples if num_samples is None else num_samples
        g = torch.Generator().manual_seed(1000 * program.seed + seed + n)
        dtype = dtype_of(program)
        self.x = torch.randn(n, LENGTH, WIDTH, generator=g, dtype=torch.float64).to(dtype)
        self.y = torch.randn(n, LENGTH, generator=g, dtype=torch.float64).to(dtype)
        lengths = torch.randint(0, LENGTH + 1, (n,), generator=g)
        self.mask = (torch.arange(LENGTH)[None] < lengths[:, None]).to(dtype)
        self.token = torch.randint(0, 7, (n,), generator=g)
        self.factor = HALF if program.subclass and seed == 0 else 1.0  # of what the training loader gives

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return i, self.x[i], self.y[i], self.mask[i], self.token[i]

    def batch(self, indices: list[int], program: Program) -> Batch:
        """Return the samples ``indices`` as the program's collate_fn gives them."""
        at = torch.tensor(indices, dtype=torch.int64)
        whole = Batch(at, self.x[at] * self.factor, self.y[at], self.mask[at], self.token[at])
        return _trimmed(whole) if program.collate == "padded" else whole


class Stream(IterableDataset[Any]):
    """The same samples without an index."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in range(len(self.rows)))


def _trimmed(batch: Batch) -> Batch:
    """Cut what no sample of the batch needs: batches have other lengths on other ranks."""
    longest = max(int(batch.mask.sum(1).max()), 1)
    return Batch(batch.index, batch.x[:, :longest], batch.y[:, :longest], batch.mask[:, :longest], batch.token)


def collate_dict(rows: list[Any]) -> dict[str, torch.Tensor]:
    return Batch(*torch.utils.data.default_collate(rows))._asdict()


def collate_padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    return _trimmed(Batch(*torch.utils.data.default_collate(rows)))._asdict()


_COLLATES: dict[str, Any] = {"tuple": None, "dict": collate_dict, "padded": collate_padded}


class Beside:
    """Adds a column that has not one row for each sample, before or after the others."""

    def __init__(self, kind: str, *, first: bool) -> None:
        self.kind, self.first = kind, first

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = collate_dict(rows)
        beside: dict[str, Any] = {"tags": ["train"]}
        if self.kind == "rows":
            beside = {"patches": batch["index"].repeat_interleave(2)}
        return {**beside, **batch} if self.first else {**batch, **beside}


class Halved(DataLoader[Any]):
    """Halves the inputs of its batches where it is iterated over."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, dict):
                yield {**batch, "x": batch["x"] * HALF}
            else:
                index, x, *rest = batch
                yield [index, x * HALF, *rest]


def fields_of(batch: Any) -> Batch:
    """Return the batch that a loader gave, whose other columns must be those of its samples."""
    if not isinstance(batch, dict):
        return Batch(*batch)
    assert batch.get("tags", ["train"]) == ["train"], batch["tags"]
    patches = batch.get("patches")
    assert patches is None or torch.equal(patches, batch["index"].repeat_interleave(2)), (patches, batch["index"])
    return Batch(**{name: batch[name] for name in Batch._fields})


class Backwards(Sampler[int]):
    """A sampler of the user's: the samples backwards, begun elsewhere in each epoch."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_samples))[::-1]
        start = self.epoch % max(self.num_samples, 1)
        return iter(order[start:] + order[:start])


class Growing(Sampler[list[int]]):
    """A batch sampler of the user's: batches of 1, 2, 3, 1, ... samples, at most."""

    def __init__(self, num_samples: int, largest: int) -> None:
        self.num_samples = num_samples
        self.largest = largest

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.num_samples:
            yield list(range(start, min(start + size, self.num_samples)))
            start += size
            size = size % self.largest + 1


class Buckets(BatchSampler):
    """Batches from buckets of several sizes, each of which ends with a batch that may be short."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        super().__init__(SequentialSampler(range(num_samples)), batch_size, drop_last=False)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, self.batch_size + 1
        while start < self.num_samples:
            bucket = range(start, min(start + size, self.num_samples))
            yield from (list(bucket[i : i + self.batch_size]) for i in range(0, len(bucket), self.batch_size))
            start += size
            size = size % (2 * self.batch_size) + 1


def make_loader(
    program: Program, rows: Rows, *, batch_size: int | None = None, world: tuple[int, int] = (0, 1)
) -> DataLoader[Any]:
    """Return the training loader; ``world`` is (rank, world size), for a DistributedSampler."""
    size = program.batch_size if batch_size is None else batch_size
    collate = (
        _COLLATES[program.collate] if program.beside == "no" else Beside(program.beside, first=bool(program.seed % 2))
    )
    common: dict[str, Any] = {"collate_fn": collate, "num_workers": program.num_workers}
    kind: Any = Halved if program.subclass else DataLoader
    if program.data == "iterable":
        return kind(Stream(rows), batch_size=size, drop_last=program.drop_last, **common)
    if program.order == "batch_sampler":
        return kind(rows, batch_sampler=Growing(len(rows), size), **common)
    if program.order == "buckets":
        return kind(rows, batch_sampler=Buckets(len(rows), size), **common)
    common |= {"batch_size": size, "drop_last": program.drop_last}
    if program.already_sharded:
        sampler: Any = DistributedSampler(rows, num_replicas=world[1], rank=world[0], shuffle=False)
        return kind(rows, sampler=sampler, **common)
    if program.order == "sampler":
        return kind(rows, sampler=Backwards(len(rows)), **common)
    if program.order == "generator":
        return kind(rows, shuffle=True, generator=torch.Generator().manual_seed(program.seed + 77), **common)
    return kind(rows, shuffle=program.order == "shuffle", **common)


def make_evaluation_loader(program: Program, rows: Rows) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=max(program.batch_size, 2), collate_fn=_COLLATES[program.collate])


@dataclass
class Output:
    prediction: torch.Tensor
    loss: torch.Tensor | None = None


class NamedOutput(NamedTuple):
    loss: torch.Tensor | None
    prediction: torch.Tensor


def _packed(kind: str, prediction: torch.Tensor, loss: torch.Tensor | None) -> Any:
    if kind == "tensor":
        return prediction if loss is None else (loss, prediction)
    if kind == "tuple":
        return (prediction,) if loss is None else (loss, prediction)
    if kind == "dict":
        return {"prediction": prediction} if loss is None else {"loss": loss, "prediction": prediction}
    if kind == "dataclass":
        return Output(prediction, loss)
    if kind == "namedtuple":
        return NamedOutput(loss, prediction)
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(loss=loss, logits=prediction)


def prediction_of(out: Any) -> torch.Tensor:
    """Return the prediction in a model's output, of whatever kind."""
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, (Output, NamedOutput)):
        return out.prediction
    if isinstance(out, tuple):
        last: torch.Tensor = out[-1]
        return last
    key = "prediction" if "prediction" in out else "logits"
    return out[key]  # type: ignore[no-any-return]


def loss_of(out: Any) -> torch.Tensor:
    """Return the loss in the output of a model that computes it."""
    if isinstance(out, tuple):
        return out[0]  # type: ignore[no-any-return]
    return out["loss"] if isinstance(out, dict) else out.loss  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        kind, hidden = program.model, 4
        self.kind, self.output = kind, program.output
        self.first = nn.Linear(WIDTH, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 1)
        if kind == "tied":
            self.again = nn.Linear(hidden, hidden)
            self.again.weight = self.middle.weight
        elif kind == "frozen":
            self.first.requires_grad_(False)
        elif kind == "sparse":
            self.embedding = nn.Embedding(7, hidden, sparse=True)
        elif kind == "branches":
            self.second = nn.Linear(WIDTH, hidden)
        elif kind == "scalar":
            self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, token: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        h = self.first(x)
        if self.kind == "sparse":
            h = h + self.embedding(token)[:, None]
        elif self.kind == "branches":
            h = (
                h + 0.0 * self.second(x).sum()
                if bool((token > 8).all())
                else h + self.second(x) * (token > 3)[:, None, None]
            )
        h = self.middle(torch.tanh(h))
        if self.kind == "tied":
            h = self.again(torch.tanh(h))
        elif self.kind == "shared":  # one layer twice in a pass
            h = self.middle(torch.tanh(h))
        elif self.kind == "scalar":
            h = h * self.scale
        prediction = self.last(torch.tanh(h)).squeeze(-1)
        return _packed(self.output, prediction, None if y is None else (prediction - y).square().mean())


def dtype_of(program: Program) -> torch.dtype:
    """Return the dtype of the data and of the model as it is loaded."""
    if program.loaded:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}[program.loaded]
    return torch.float32 if program.float32 else torch.float64


def make_model(program: Program) -> nn.Module:
    """Return the model, with weights of the program's seed; torch's own stream of random numbers is left alone."""
    before = torch.get_rng_state()
    torch.manual_seed(program.seed + 5)
    model = Net(program)
    torch.set_rng_state(before)
    return model.to(dtype_of(program))


def losses_of(program: Program, model: Any, batch: Batch) -> Iterator[tuple[torch.Tensor, float | None]]:
    """Yield the losses of a batch, each a mean, with the number of items that it is one over (None: samples)."""
    if program.loss == "inside":
        yield loss_of(model(batch.x, batch.token, y=batch.y)), None
        return
    error = (prediction_of(model(batch.x, batch.token)) - batch.y).square()
    if program.loss == "items":
        yield (error * batch.mask).sum() / batch.mask.sum(), float(batch.mask.sum())
        return
    yield error.mean(), None
    if program.loss == "two":
        yield prediction_of(model(batch.x * 2, batch.token)).abs().mean() * 0.1, None


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.2, max_iter=3, history_size=3),
}


def make_optimizers(program: Program, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers over the parameters of ``model``."""
    named = list(model.named_parameters())
    if program.model == "frozen" and program.unfreezes is None and program.seed % 2:
        named = [(name, p) for name, p in named if p.requires_grad]
    parts = [named] if program.optimizers == 1 else [named[::2], named[1::2]]
    made = []
    for part in parts:
        if program.frozen_group:
            frozen = [p for name, p in part if name.startswith("first")]
            others = [p for name, p in part if not name.startswith("first")]
            made.append(_OPTIMIZERS[program.optimizer]([{"params": frozen}, {"params": others}]))
            made[-1].param_groups[0]["lr"] *= 3
            continue
        if program.groups == 1:
            made.append(_OPTIMIZERS[program.optimizer]([p for _, p in part]))
            continue
        slow = [p for name, p in part if name.endswith("bias")]
        fast = [p for name, p in part if not name.endswith("bias")]
        groups = [{"params": group} for group in (fast, slow) if group]
        made.append(_OPTIMIZERS[program.optimizer](groups))
        made[-1].param_groups[-1]["lr"] *= 0.5
    return made


def make_schedule(program: Program, optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule of the learning rate; None: none."""
    if program.schedule == "none":
        return None
    if program.schedule == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    if program.schedule == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
