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
from torch.utils.data import TensorDataset, default_collate

from echelon.trainer import Trainer
from tests.reference import PlainTraining, train_plainly, warmup_then_linear
from tests.trainer_models import arguments, logged

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
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
) -> tuple[PlainTraining, list[torch.Tensor]]:
    """Return a training by a plain loop, and the losses of its batches."""
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1 if decays else 0.0}, {"params": biases, "weight_decay": 0.0}]
    losses: list[torch.Tensor] = []

    def loss_of(batch: list[int]) -> torch.Tensor:
        images, labels = default_collate([data[i] for i in batch])
        loss = F.nll_loss(model(images), labels)
        losses.append(loss.detach())
        return loss

    model.train()
    plain = train_plainly(
        model,
        loss_of,
        num_samples=N,
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=SEED,
        accumulation=accumulation,
        optimizer=torch.optim.AdamW(groups, fused=True),
        rate=warmup_then_linear(1e-3, warmup=warmup, total=EPOCHS * -(-7 // accumulation)),
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, max_norm),
    )
    return plain, losses


@pytest.mark.slow
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
    settings: dict[str, Any] = {"max_norm": max_norm, "warmup": warmup, "decays": decays}
    plain, losses = _plain_loop(reference, data, accumulation=accumulation, **settings)
    args = arguments(
        tmp_path, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, learning_rate=1e-3, warmup_steps=warmup,
        max_grad_norm=max_norm, weight_decay=0.1 if decays else 0.0, gradient_accumulation_steps=accumulation,
        logging_steps=1, seed=SEED, use_cpu=True,
    )  # fmt: skip
    trainer = Digits(model_init=net if dropout else lambda: _without_dropout(net()), args=args, train_dataset=data)
    result = trainer.train()

    assert torch.equal(torch.stack(trainer.losses), torch.stack(losses))
    assert logged(trainer, "grad_norm") == plain.norms
    assert logged(trainer, "learning_rate") == plain.rates
    for (name, ours), theirs in zip(trainer.model.state_dict().items(), reference.state_dict().values()):
        assert torch.equal(ours, theirs), name
    assert result.global_step == trainer.state.global_step == len(plain.losses) == EPOCHS * -(-7 // accumulation)


def test_the_logged_loss_is_the_mean_of_its_window(
    mnist_parts: tuple[type[nn.Module], TensorDataset], tmp_path: Path
) -> None:
    net, data = mnist_parts
    args = arguments(
        tmp_path, per_device_train_batch_size=BATCH, num_train_epochs=2, gradient_accumulation_steps=2, logging_steps=3
    )
    trainer = Digits(model_init=net, args=args, train_dataset=data)
    result = trainer.train()
    losses = torch.stack(trainer.losses).double()  # 4 steps a pass: batches (0 1) (2 3) (4 5) (6)
    steps = torch.stack([g.mean() for e in range(2) for g in losses[7 * e : 7 * e + 7].split(2)])
    assert logged(trainer, "step") == [3, 6]
    first, second = logged(trainer)
    # Halving a float32 loss is exact, and the sum is float64.
    assert first == pytest.approx(steps[:3].mean().item(), rel=1e-15)
    assert second == pytest.approx(steps[3:6].mean().item(), rel=1e-15)
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
    args = arguments(
        tmp_path, per_device_train_batch_size=1, max_steps=4, logging_steps=1, lr_scheduler_type="constant"
    )
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.0)  # nothing moves: all norms are equal
    trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, None))
    trainer.train()
    norms = logged(trainer, "grad_norm")
    assert len(norms) == 4
    assert len(set(norms)) == 1


def test_an_infinite_loss_is_left_out_of_the_logged_mean_and_only_there(tmp_path: Path) -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, value: torch.Tensor) -> tuple[torch.Tensor]:
            return ((self.weight * value).mean(),)

    values = [1.0, float("inf"), 3.0, float("nan")]
    data = [{"value": torch.tensor(v)} for v in values]

    def losses(**options: Any) -> list[float]:
        args = arguments(
            tmp_path, per_device_train_batch_size=1, train_sampling_strategy="sequential", learning_rate=0.0, optim="sgd",
            max_grad_norm=0, **options,
        )  # fmt: skip
        trainer = Trainer(Given(), args, train_dataset=data)
        trainer.train()
        return logged(trainer)

    # 0 * inf = nan: the weight is nan after step 2, and with it the third loss.
    assert losses(logging_steps=2)[0] == 1.0
    assert torch.tensor(losses(logging_steps=2)[1]).isnan()  # none is finite: no number is made up
    # Without the filter the losses are added up as they are: inf + 1, and then nan.
    assert losses(logging_steps=2, logging_nan_inf_filter=False)[0] == math.inf
    every = losses(logging_steps=1, logging_nan_inf_filter=False)
    assert every[:2] == [1.0, math.inf]
    assert all(math.isnan(value) for value in every[2:])
