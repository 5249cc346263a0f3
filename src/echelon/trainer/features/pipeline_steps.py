"""Training steps of a model in stages (``TrainingArguments(parallelism_config=ParallelismConfig(pp_size=...))``)."""

from __future__ import annotations

from typing import Any

import torch

from echelon.accelerator.pipeline import Pipeline
from echelon.base.errors import ConfigError
from echelon.trainer.hooks import TrainerHooks

__all__ = ["refuse_own_losses", "run_pipeline_step", "splits_layers"]


def splits_layers(hooks: TrainerHooks) -> bool:
    """Return whether the model's layers are divided among ranks."""
    config = hooks.accelerator.parallelism_config
    return config is not None and config.pp_enabled


def refuse_own_losses(hooks: TrainerHooks) -> None:
    """Check that the loss is the model's own, because it is computed inside the schedule.

    Raises:
        ConfigError: the loss is computed elsewhere.
    """
    args = hooks.args
    wrong = [
        name
        for name, is_wrong in (
            ("compute_loss_func", hooks.compute_loss_func is not None),
            ("label_smoothing_factor", bool(args.label_smoothing_factor)),
            ("auto_find_batch_size", args.auto_find_batch_size),
        )
        if is_wrong
    ]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} does not work with pp_size above 1, because the schedule of the pipeline computes the model's own loss",
            where="TrainingArguments.parallelism_config",
            do=f"remove {wrong[0]}, or write the loop with accelerator.prepare_pipeline(model, loss_fn=...)",
        )


def run_pipeline_step(hooks: TrainerHooks, pipeline: Pipeline, inputs: Any, num_items: Any) -> torch.Tensor:
    """Run forward and backward passes of a batch; return its loss as ``Trainer.training_step`` does."""
    if hooks.accelerator.parity != "off":
        return pipeline.step(inputs)
    if num_items is None:
        return pipeline.step(inputs, weight=1.0 / hooks.current_gradient_accumulation_steps)
    weight = pipeline.stages.count_items(inputs) / float(num_items)
    if hooks.args.average_tokens_across_devices:
        weight *= hooks.accelerator.session.num_readers  # the ranks' gradients are averaged
    return pipeline.step(inputs, weight=weight)
