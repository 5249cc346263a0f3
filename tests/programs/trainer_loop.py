"""A drawn program as a script on echelon's Trainer (level 3): what a user would write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from echelon import Trainer, TrainerCallback, TrainingArguments
from tests.prepared_loop import whole
from tests.programs.loop import Found
from tests.programs.parts import Rows
from tests.programs.plain import ORDER_SEED
from tests.programs.program import Layout, Program
from tests.programs.trainer_parts import (
    NAMED_RATE,
    Named,
    NamedStream,
    class_loss,
    collate_padded,
    collate_tuple,
    make_net,
    make_optimizer,
    square_loss,
    two_losses,
)

_NAMES = {"sgd": "sgd", "momentum": "sgd", "adamw": "adamw_torch", "adagrad": "adagrad", "rmsprop": "rmsprop"}
_SCHEDULES = {"linear": "linear", "warmup": "constant_with_warmup"}


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Notes what each update was, and ends the pass or the training where the program says so."""

    def __init__(self, program: Program, *, goes_on: bool) -> None:
        self.program, self.goes_on = program, goes_on
        self.found = Found()
        self.num_updates = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_updates = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_updates += 1
        self.found.rates.append(float(kwargs["optimizer"].param_groups[-1]["lr"]))
        if state.global_step == self.program.saves and not self.goes_on:
            control.should_save = control.should_training_stop = True
            self.found.has_saved = True
        if self.num_updates == self.program.breaks:
            control.should_epoch_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.found.losses.append(logs["loss"])
        if "grad_norm" in logs:
            self.found.norms.append(logs["grad_norm"])
        if "eval_loss" in logs:
            self.found.evaluation_losses.append(logs["eval_loss"])


class _OwnLoss(Trainer):  # type: ignore[misc]
    """A Trainer whose loss is the script's, a mean over the batch."""

    loss: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        if isinstance(inputs, dict):
            outputs, labels = model(inputs["x"], inputs["token"]), inputs["labels"]
        else:
            outputs, labels = model(*inputs[:2]), inputs[2]
        loss = type(self).loss(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class _ScaledLoss(Trainer):  # type: ignore[misc]
    """A Trainer whose loss is divided by the batches of an update already, as ``compute_loss_func`` says."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["x"], inputs["token"])
        loss = square_loss(outputs, inputs["labels"])
        if self.model.training:
            loss = loss / self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


class _LateKeywords(Trainer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class _LateNames(Trainer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label_names = ["target"]


class _LateReturn(Trainer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.can_return_loss = True


_LATE = {"loss_kwargs": _LateKeywords, "label_names": _LateNames, "can_return_loss": _LateReturn}


class _OwnSquareLoss(_OwnLoss):
    loss = staticmethod(square_loss)


class _OwnTwoLosses(_OwnLoss):
    loss = staticmethod(two_losses)


def _square_func(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return square_loss(outputs, labels)


def arguments(program: Program, layout: Layout, folder: Path) -> TrainingArguments:
    """Return the arguments of the program."""
    options: dict[str, Any] = {}
    if layout.engine is not None and layout.engine.startswith("fsdp2"):
        options["fsdp"] = "full_shard" if layout.engine == "fsdp2 stage 3" else "shard_grad_op"
    else:
        options["engine"] = layout.engine
    if layout.parity != "off":
        options |= {"parity": layout.parity, "data_seed": program.seed + ORDER_SEED}
        options |= {"max_micro_batch_size": layout.max_micro, "canonical_shards": layout.shards}
        if program.says_global:
            options["global_batch_size"] = program.batch_size
    if program.evaluates != "no":
        options |= {"eval_strategy": "epoch" if program.evaluates == "epoch" else "steps", "eval_steps": 2}
    if program.by_name:
        options |= {"optim": _NAMES[program.optimizer], "learning_rate": NAMED_RATE, "weight_decay": 0.01}
        if program.optimizer == "momentum":
            options["optim_args"] = "momentum=0.9"
    config: dict[str, Any] = {"even_batches": program.even_batches, "split_batches": program.split_batches}
    config["dispatch_batches"] = program.dispatches
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=program.batch_size,
        per_device_eval_batch_size=max(program.batch_size, 2),
        gradient_accumulation_steps=program.accumulation,
        num_train_epochs=program.epochs,
        max_steps=program.max_steps or -1,
        lr_scheduler_type=_SCHEDULES.get(program.schedule, "constant"),
        warmup_steps=2 if program.schedule in _SCHEDULES else 0,
        max_grad_norm=0.05 if program.clipping == "norm" else 0.0,
        train_sampling_strategy="random" if program.order == "shuffle" else "sequential",
        dataloader_drop_last=program.drop_last,
        dataloader_num_workers=program.num_workers,
        dataloader_persistent_workers=program.num_workers > 0,
        bf16=program.bf16,
        accelerator_config=config,
        logging_steps=1,
        save_strategy="no",
        seed=program.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )


def train(program: Program, layout: Layout, folder: Path, *, goes_on: bool = False) -> Found:
    """Run the program on this rank. ``goes_on``: from what was saved in ``folder``."""
    if program.adapter != "no":
        model = make_net(program, adapter_seed=1000 if goes_on else 0)
    else:
        model = make_net(replace(program, seed=program.seed + 1000) if goes_on else program)
    given: tuple[Any, Any] = (None, None)
    if not program.by_name:
        from tests.programs.parts import make_schedule

        optimizer = make_optimizer(program, model)
        given = (optimizer, None if program.schedule in _SCHEDULES else make_schedule(program, optimizer))
    data: Any = Named(program, Rows(program))
    evaluation: Any = Named(program, Rows(program, num_samples=5 + program.seed % 7, seed=900))
    watch = _Watch(program, goes_on=goes_on)
    found = watch.found

    def keep(result: Any) -> dict[str, float]:
        predictions = torch.as_tensor(result.predictions)[:, 0]
        found.evaluated.append(list(range(len(predictions))))
        found.evaluations.append(predictions)
        return {}

    kinds = {"own": _OwnSquareLoss, "two": _OwnTwoLosses, "sentinel": _ScaledLoss}
    kind = _LATE.get(program.late) or kinds.get(program.loss, Trainer)
    sentinel = "scaled" if program.seed % 2 else _square_func
    trainer = kind(
        model,
        arguments(program, layout, folder),
        data_collator={"tuple": collate_tuple, "padded": collate_padded}.get(program.collate),
        train_dataset=NamedStream(data) if program.data == "iterable" else data,
        eval_dataset=None if program.evaluates == "no" else evaluation,
        compute_loss_func={"func": _square_func, "items": class_loss, "sentinel": sentinel}.get(program.loss),
        compute_metrics=None if program.late == "can_return_loss" else keep,  # there are no labels to give it
        callbacks=[watch],
        optimizers=given,
    )
    trainer.train(resume_from_checkpoint=True if goes_on else None)
    for seed in (901, 902, 901) if program.eval_sets else ():
        trainer.evaluate(Named(program, Rows(program, num_samples=5 + program.seed % 7, seed=seed)))
    found.num_steps = trainer.state.global_step
    found.weights = [whole(parameter) for parameter in trainer.model.parameters()]
    return found
