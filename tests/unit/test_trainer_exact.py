"""The Trainer on one process follows a plain PyTorch loop bit for bit: losses, norms, learning rates and weights."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon.trainer import Trainer, TrainingArguments

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
N, BATCH, EPOCHS, SEED = 200, 32, 2, 3  # 7 batches a pass, the last one of 8


@pytest.fixture(scope="module")
def mnist_parts() -> tuple[type[nn.Module], TensorDataset]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from mnist_data import mnist
        from mnist_net import Net
    finally:
        sys.path.remove(str(EXAMPLES))
    return Net, mnist(True, limit=N)


class Digits(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        images, labels = inputs
        outputs = model(images)
        loss = F.nll_loss(outputs, labels)
        if self.is_in_train:
            self.losses.append(loss.detach())
        return (loss, outputs) if return_outputs else loss


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _plain_loop(
    model: nn.Module, data: TensorDataset, *, accumulation: int, max_norm: float, warmup: int, decays: bool
) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """Return losses of the batches, then norms and learning rates of the steps; knows nothing of echelon."""
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1 if decays else 0.0}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    steps_per_epoch = math.ceil(math.ceil(N / BATCH) / accumulation)
    total = EPOCHS * steps_per_epoch
    losses, norms, rates = [], [], []
    model.train()
    step = 0
    for epoch in range(EPOCHS):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        batches = list(DataLoader(data, batch_size=BATCH, sampler=order))
        for first in range(0, len(batches), accumulation):
            group = batches[first : first + accumulation]
            for images, labels in group:
                loss = F.nll_loss(model(images), labels)
                losses.append(loss.detach())
                (loss / len(group)).backward()
            rate = step / warmup if step < warmup else max(0.0, (total - step) / (total - warmup))
            for param_group in optimizer.param_groups:
                param_group["lr"] = 1e-3 * rate
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            rates.append(1e-3 * rate)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return losses, norms, rates


@pytest.mark.parametrize("accumulation", [1, 4])  # 7 batches: the last update has 3
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(("max_norm", "warmup", "decays"), [(1.0, 3, False), (0.05, 5, True)])
def test_two_passes_equal_a_plain_loop_bit_for_bit(
    mnist_parts: tuple[type[nn.Module], TensorDataset],
    tmp_path: Path,
    accumulation: int,
    dropout: bool,
    max_norm: float,
    warmup: int,
    decays: bool,
) -> None:
    net, data = mnist_parts
    torch.manual_seed(SEED)
    reference = net() if dropout else _without_dropout(net())
    losses, norms, rates = _plain_loop(
        reference, data, accumulation=accumulation, max_norm=max_norm, warmup=warmup, decays=decays
    )

    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=1e-3,
        warmup_steps=warmup,
        max_grad_norm=max_norm,
        weight_decay=0.1 if decays else 0.0,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        save_strategy="no",
        seed=SEED,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Digits(model_init=net if dropout else lambda: _without_dropout(net()), args=args, train_dataset=data)
    result = trainer.train()

    assert torch.equal(torch.stack(trainer.losses), torch.stack(losses))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["grad_norm"] for entry in logs] == norms
    # LambdaLR multiplies the peak by the factor; so does the reference.
    assert [entry["learning_rate"] for entry in logs] == rates
    for (name, ours), theirs in zip(trainer.model.state_dict().items(), reference.state_dict().values()):
        assert torch.equal(ours, theirs), name
    steps = EPOCHS * -(-7 // accumulation)
    assert result.global_step == trainer.state.global_step == len(logs) == steps


def test_the_logged_loss_is_the_mean_of_its_window(
    mnist_parts: tuple[type[nn.Module], TensorDataset], tmp_path: Path
) -> None:
    net, data = mnist_parts
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        logging_steps=3,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Digits(model_init=net, args=args, train_dataset=data)
    result = trainer.train()
    losses = torch.stack(trainer.losses).double()  # 4 steps a pass: batches (0 1) (2 3) (4 5) (6)
    steps = torch.stack([g.mean() for e in range(2) for g in losses[7 * e : 7 * e + 7].split(2)])
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert [step for step, _ in logged] == [3, 6]
    # Halving a float32 loss is exact, and the sum is float64.
    assert logged[0][1] == pytest.approx(steps[:3].mean().item(), rel=1e-15)
    assert logged[1][1] == pytest.approx(steps[3:6].mean().item(), rel=1e-15)
    assert result.training_loss == pytest.approx(steps.mean().item(), rel=1e-15)


def test_gradients_outside_the_optimizer_do_not_pile_up(tmp_path: Path) -> None:
    # The user's optimizer trains the head only; the norm must be that of one step, not the sum of all steps before.
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.mse_loss(self.head(self.body(x)).squeeze(1), labels)}

    torch.manual_seed(0)
    model = Two()
    data = [{"x": torch.ones(4), "labels": torch.tensor(1.0)}] * 8
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        max_steps=4,
        logging_steps=1,
        lr_scheduler_type="constant",
        save_strategy="no",
        disable_tqdm=True,
    )
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.0)  # nothing moves: all norms are equal
    trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == 4
    assert len(set(norms)) == 1


def test_items_of_an_update_weigh_equally_when_the_loss_is_divided_by_them(tmp_path: Path) -> None:
    # Batches with 1, 2 and 4 labels: the update is the mean over all 7, not the mean of three means.
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
            error = ((self.weight * x - labels) ** 2)[labels != -100].sum()
            return {"loss": error / kwargs.get("num_items_in_batch", (labels != -100).sum())}

    x = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(3, 4)
    labels = torch.full((3, 4), -100.0, dtype=torch.float64)
    labels[0, :1], labels[1, :2], labels[2, :] = 1.0, 2.0, 3.0
    data = [{"x": x[i], "labels": labels[i]} for i in range(3)]
    model = Sums()
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        num_train_epochs=1,
        logging_steps=1,
        max_grad_norm=0,
        optim="sgd",
        learning_rate=0.001,
        lr_scheduler_type="constant",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    used = labels != -100
    gradient = (2 * x * (2.0 * x - labels))[used].sum() / 7
    assert model.weight.item() == pytest.approx(2.0 - 0.001 * gradient.item(), rel=1e-14)
    loss = ((2.0 * x - labels) ** 2)[used].sum().item() / 7
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-14)


def test_an_infinite_loss_is_left_out_of_the_logged_mean_and_only_there(tmp_path: Path) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, value: torch.Tensor) -> tuple[torch.Tensor]:
            return ((self.weight * value).mean(),)

    values = [1.0, float("inf"), 3.0, float("nan")]
    data = [{"value": torch.tensor(v)} for v in values]

    def logged(**options: Any) -> list[float]:
        args = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            learning_rate=0.0,
            optim="sgd",
            max_grad_norm=0,
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(Given(), args, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    # 0 * inf = nan: the weight is nan after step 2, and with it the third loss.
    assert logged(logging_steps=2)[0] == 1.0
    assert torch.tensor(logged(logging_steps=2)[1]).isnan()  # none is finite: no number is made up
    # Without the filter the losses are added up as they are: inf + 1, and then nan.
    assert logged(logging_steps=2, logging_nan_inf_filter=False)[0] == math.inf
    every = logged(logging_steps=1, logging_nan_inf_filter=False)
    assert every[:2] == [1.0, math.inf]
    assert all(math.isnan(value) for value in every[2:])
