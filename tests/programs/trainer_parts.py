"""The parts of a drawn program for a Trainer in plain PyTorch: samples with names, a model with a loss, losses. Nothing of echelon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from tests.programs.parts import Rows, _packed, make_model, make_optimizers, make_schedule, prediction_of
from tests.programs.program import Program

NO_LABEL = -100
NAMED_RATE = 0.02  # of optimizers that the arguments name


class Named(Dataset[Any]):
    """The samples as dicts; with classes as labels, of which some do not count, where the loss is one over items."""

    def __init__(self, program: Program, rows: Rows) -> None:
        self.rows = rows
        self.labels = rows.y
        self.kind = program.labels
        self.name = {"label_names": "target", "can_return_loss": "y"}.get(program.late, "labels")
        if program.labels in ("number", "one"):
            self.labels = rows.y[:, 0].float()
        elif program.labels == "int32":
            self.labels = (rows.y[:, 0] > 0).long()
        elif program.labels == "hot":
            self.labels = (rows.y > 0).float()
        elif program.labels == "ids":
            self.labels = rows.y.float()
        if counts_items(program):
            self.labels = torch.where(rows.mask > 0, (rows.y > 0).long(), NO_LABEL)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows.x[i], "token": self.rows.token[i], **self._label(i)}

    def _label(self, i: int) -> dict[str, Any]:
        """Return the label of a sample as a script gives it to the default collator."""
        label = self.labels[i]
        if self.kind == "ids":
            return {"label_ids": label.tolist()}
        if self.kind == "vector":
            return {self.name: label}
        given = {"one": lambda: label.reshape(1), "int32": label.int, "hot": label.int().tolist, "number": label.tolist}
        return {"label": given[self.kind]()}

    def batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return the samples ``indices``."""
        at = torch.tensor(indices, dtype=torch.int64)
        return {"x": self.rows.x[at], "token": self.rows.token[at], "labels": self.labels[at]}


class NamedStream(IterableDataset[Any]):
    """The same samples without an index."""

    def __init__(self, data: Named) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


def collate_padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack samples, and cut the positions that none of them needs."""
    batch: dict[str, torch.Tensor] = torch.utils.data.default_collate(samples)
    longest = max(int(batch["labels"].ne(NO_LABEL).sum(1).max()), 1)
    return {"x": batch["x"][:, :longest], "token": batch["token"], "labels": batch["labels"][:, :longest]}


def collate_tuple(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Stack samples as the arguments of forward in their order."""
    batch = torch.utils.data.default_collate(samples)
    return batch["x"], batch["token"], batch["labels"]


def counts_items(program: Program) -> bool:
    """Tell whether the loss is a mean over labels."""
    return program.loss in ("items", "model_items")


class Net(nn.Module):
    """A drawn model that computes the loss itself where it is given labels."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.net = make_model(program)
        self.output, self.is_inside = program.output, program.loss == "inside"

    def forward(self, x: torch.Tensor, token: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        prediction = prediction_of(self.net(x, token))
        loss = square_loss(prediction, labels) if self.is_inside and labels is not None else None
        return _packed(self.output, prediction, loss)


class ItemsNet(nn.Module):
    """A drawn model whose loss is divided by the labels of the whole update, where it is told their number."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.net = make_model(program)
        self.output = program.output

    def forward(self, x: torch.Tensor, token: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        prediction = prediction_of(self.net(x, token))
        loss = None if labels is None else class_loss(prediction, labels, kwargs.get("num_items_in_batch"))
        return _packed(self.output, prediction, loss)


class KeywordsNet(Net):
    """A model that takes any keyword, and whose loss is a mean in any case."""

    def forward(self, x: torch.Tensor, token: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(x, token, labels)


class TargetNet(Net):
    """A model whose labels have another name."""

    def forward(self, x: torch.Tensor, token: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        return super().forward(x, token, target)


class OwnTargetNet(Net):
    """A model whose labels have another name, and are not known to be labels."""

    def forward(self, x: torch.Tensor, token: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return super().forward(x, token, y)


_NETS = {"loss_kwargs": KeywordsNet, "label_names": TargetNet, "can_return_loss": OwnTargetNet, "no": Net}


def make_net(program: Program, *, adapter_seed: int = 0) -> Any:
    """Return the model; ``adapter_seed`` is that of its adapters."""
    net = ItemsNet(program) if program.loss == "model_items" else _NETS[program.late](program)
    return net if program.adapter == "no" else _with_adapters(program, net, seed=program.seed + adapter_seed)


def _with_adapters(program: Program, net: nn.Module, *, seed: int) -> Any:
    """Return a PEFT model, of which a layer outside of the adapters may be trained, too."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["net.middle"], init_lora_weights=False)
    before = torch.get_rng_state()
    torch.manual_seed(seed + 9)
    name = "mine" if program.adapter == "named" else "default"
    model: Any = peft.get_peft_model(net, config, adapter_name=name)
    if program.adapter == "two":
        model.add_adapter("other", config)
        model.set_adapter("other")
    torch.set_rng_state(before)
    if program.seed % 3 == 0:
        model.base_model.model.net.last.requires_grad_(True)
    return model


def square_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over samples and positions; of a label for each sample, over samples."""
    prediction = prediction_of(outputs)
    return ((prediction.mean(-1) if labels.ndim == 1 else prediction) - labels).square().mean()


def two_losses(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return two means, added up."""
    return square_loss(outputs, labels) + prediction_of(outputs).abs().mean() * 0.1


def class_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return the sum of the losses of the labels that count, by ``num_items_in_batch``, else by their own number."""
    total = item_losses(prediction_of(outputs), labels).sum()
    if num_items_in_batch is None:
        return total / labels.ne(NO_LABEL).sum()  # none: nan, and a part of an update without items adds nothing
    return total / torch.clamp(torch.as_tensor(num_items_in_batch), min=1)


def item_losses(prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each position; 0 where the label does not count."""
    return torch.where(labels.ne(NO_LABEL), F.softplus(prediction * (1 - 2 * labels)), 0.0)


def losses_of(program: Program, model: nn.Module, batch: dict[str, torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    """Yield the mean loss of a batch, with the items that it is one over (None: samples)."""
    prediction = prediction_of(model(batch["x"], batch["token"]))
    if counts_items(program):
        num_items = int(batch["labels"].ne(NO_LABEL).sum())
        yield item_losses(prediction, batch["labels"]).sum() / max(num_items, 1), float(num_items)
    else:
        yield (two_losses if program.loss == "two" else square_loss)(prediction, batch["labels"]), None


def make_optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    """Return what the program's optimizer is in plain PyTorch, also where arguments name it."""
    if not program.by_name:
        return make_optimizers(program, model)[0]
    # As the documents of transformers say: no decay of biases.
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if not name.endswith("bias")]
    others = [p for name, p in named if name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    kind = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adamw": torch.optim.AdamW}.get(program.optimizer)
    if kind is None:
        kind = {"adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}[program.optimizer]
    more: dict[str, Any] = {"momentum": 0.9} if program.optimizer == "momentum" else {}
    return kind(groups, lr=NAMED_RATE, **more)


def make_trainer_schedule(program: Program, optimizer: torch.optim.Optimizer, *, num_steps: int) -> Any:
    """Return the schedule; those that arguments name by their formula, over ``num_steps`` updates."""
    warmup = 2
    if program.schedule == "linear":
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: step / warmup if step < warmup else max(0.0, (num_steps - step) / max(1, num_steps - warmup)),
        )
    if program.schedule == "warmup":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warmup))
    return make_schedule(program, optimizer)
