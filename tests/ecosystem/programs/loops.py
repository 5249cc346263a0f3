"""pytorch-accelerated: its Trainer with callbacks, schedule, early stopping and the best weights."""

import sys
from functools import partial

import tiny
import torch
from pytorch_accelerated.callbacks import EarlyStoppingCallback, SaveBestModelCallback
from pytorch_accelerated.schedulers import CosineLrScheduler
from pytorch_accelerated.trainer import DEFAULT_CALLBACKS, Trainer, TrainerPlaceholderValues
from torch import nn
from torch.utils.data import TensorDataset


def main() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(90, 6, generator=generator)
    y = x[:, :3].argmax(1)
    callbacks = (*DEFAULT_CALLBACKS, SaveBestModelCallback("best.pt"), EarlyStoppingCallback(early_stopping_patience=5))
    trainer = Trainer(
        model=model, loss_func=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks
    )  # fmt: skip
    trainer.train(
        train_dataset=TensorDataset(x[:70], y[:70]),
        eval_dataset=TensorDataset(x[70:], y[70:]),
        num_epochs=4,
        per_device_batch_size=8,
        train_dataloader_kwargs={"shuffle": "--in-order" not in sys.argv},
        gradient_clip_value=1.0,
        create_scheduler_fn=partial(
            CosineLrScheduler,
            total_num_epochs=TrainerPlaceholderValues.NUM_EPOCHS,
            num_update_steps_per_epoch=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH,
            num_warmup_epochs=1,
            warmup_starting_lr=1e-3,
        ),
    )
    history = trainer.run_history
    tiny.show(
        train=history.get_metric_values("train_loss_epoch"), evaluated=history.get_metric_values("eval_loss_epoch"),
        weights=model[0].weight.flatten()[:4].tolist(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
