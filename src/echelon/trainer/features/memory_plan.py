"""``plan=True``: predicts the memory of the Trainer's step before the training, and refuses one that does not fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from echelon.base.errors import UsageError
from echelon.base.lengths import length_of
from echelon.base.messages.translation import gettext as _
from echelon.trainer.session import TrainerSession
from echelon.trainer.trainer_methods import TrainerMethods


def plan_training(trainer: TrainerMethods, session: TrainerSession, loader: Any) -> None:
    """Print the plan of a step on the first samples, on rank zero.

    Collective: call on every rank, before the model and the optimizer are prepared.

    Raises:
        ConfigError: the step does not fit into the memory of the device, or of ``gpu_memory``.
        UsageError: the data has no length, or the step cannot be traced.
    """
    from echelon.accelerator.step_plan import plan_run  # noqa: PLC0415 - torch's fake tensors take a second to import

    def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = trainer.compute_loss(model, batch)
        assert isinstance(loss, torch.Tensor), type(loss)
        return loss

    plan_run(
        trainer.accelerator.session,
        trainer.model,
        trainer.optimizer,
        lambda: _first_batch(getattr(loader, "original", loader)),
        compute_loss,
        # In the exact modes, a batch of the loader is the whole update.
        accumulation=session.update_size(trainer.args).accumulation_steps if trainer.accelerator.parity == "off" else 1,
    )


def _first_batch(loader: Any) -> Any:
    """Return the first samples of the data as a batch, without a pass over the loader."""
    dataset: Any = loader.dataset if isinstance(loader, DataLoader) else None
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    length = length_of(dataset)
    if isinstance(dataset, IterableDataset) or length < 1 or size is None:
        raise UsageError(
            _("plan=True reads the first samples by their indices, which the training data does not have"),
            where="TrainingArguments.plan",
            do=_("pass a dataset with a length, or remove plan=True and run echelon plan on the script"),
        )
    return loader.collate_fn([dataset[i % length] for i in range(size)])
