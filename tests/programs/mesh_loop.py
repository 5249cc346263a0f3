"""A drawn mesh program as a script on echelon: a loop on the Accelerator (level 2), or a Trainer (level 3)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from echelon import Accelerator, DataLoaderConfiguration, ParallelismConfig, Trainer, TrainerCallback, TrainingArguments
from echelon.base.warnings import EchelonWarning
from echelon.utils import TorchContextParallelConfig, TorchTensorParallelConfig, shift_labels
from tests.parallel_models import GPT_PLAN, num_tokens
from tests.prepared_loop import whole
from tests.programs.mesh_program import (
    CLIP,
    ORDER_SEED,
    Found,
    MeshProgram,
    build,
    collate,
    logits_of,
    make_loader,
    make_optimizer,
    make_rows,
    make_schedule,
    mean_loss_of,
    next_labels,
    sample_losses,
)
from tests.ranks.engines.test_tensor_parallel import _sequence_parallel_plan


def train(program: MeshProgram, folder: str | None, *, goes_on: bool = False) -> Found:
    """Run the program on this rank. ``goes_on``: from what was saved in ``folder``."""
    with warnings.catch_warnings():
        # A mesh with another number of readers, and evaluation of whole sequences.
        warnings.filterwarnings("ignore", ".*contains RNG states for", EchelonWarning)
        warnings.filterwarnings("ignore", "The dtype of `?attn_mask", UserWarning)
        if program.level == 3:
            return _train_by_trainer(program, folder, goes_on=goes_on)
        return _Script(program, folder, goes_on=goes_on).run()


def _config(program: MeshProgram) -> ParallelismConfig | None:
    if not program.sizes:
        return None
    handlers: dict[str, Any] = {}
    if program.size("tp") > 1 and program.model != "llama":
        plan: dict[str, Any] = _sequence_parallel_plan() if program.splits_sequences else GPT_PLAN
        handlers["tp_handler"] = TorchTensorParallelConfig(plan=plan, loss_parallel=program.splits_sequences)
    if program.size("cp") > 1:
        handlers["cp_handler"] = TorchContextParallelConfig(cp_comm_strategy=program.exchange)
    return ParallelismConfig(**dict(program.sizes), **handlers)


class _Script:
    def __init__(self, program: MeshProgram, folder: str | None, *, goes_on: bool) -> None:
        self.program, self.folder = program, folder
        self.found = Found()
        self.accelerator = accelerator = Accelerator(
            cpu=True,
            parity=program.parity,
            gradient_accumulation_steps=program.accumulation,
            max_micro_batch_size=program.max_micro,
            parallelism_config=_config(program),
            dataloader_config=DataLoaderConfiguration(
                use_seedable_sampler=True,
                data_seed=program.seed + ORDER_SEED,
            ),
        )
        torch.manual_seed(program.seed)
        model: Any = build(program, seed=1 if goes_on else 0)
        optimizer: Any = make_optimizer(program, model)
        schedule: Any = make_schedule(program, optimizer)
        self.pipeline: Any = None
        if program.size("pp") > 1:
            of_loss: dict[str, Any] = {}
            if program.loss != "inside":
                of_loss["loss_fn"] = lambda logits, batch: mean_loss_of(logits, batch["labels"])
            if program.loss == "items":
                of_loss["count_items"] = lambda batch: float(num_tokens(batch["labels"]))
            self.pipeline = accelerator.prepare_pipeline(
                model, schedule=program.schedule_of_stages, num_micro_batches=program.num_micro_batches, **of_loss
            )
            optimizer = accelerator.prepare(optimizer)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self.schedule = None if schedule is None else accelerator.prepare(schedule)
        self.loader: Any = accelerator.prepare(make_loader(program, make_rows(program)))
        self.evaluation_loader: Any = None
        if program.evaluates:
            rows = make_rows(program, evaluation=True)
            self.evaluation_loader = accelerator.prepare(make_loader(program, rows, evaluation=True))
        if goes_on:
            accelerator.resume(folder)

    def run(self) -> Found:
        program, accelerator, found = self.program, self.accelerator, self.found
        epochs: Any = range(program.epochs) if program.saves is None else accelerator.epochs(program.epochs)
        for epoch in epochs:
            if program.unfreezes and epoch >= 1:
                self.model.requires_grad_(True)
            self.model.train()
            self.loader.set_epoch(epoch)
            self._epoch()
            if found.has_saved:
                break
            if program.evaluates:
                self._evaluate()
        inner = accelerator.unwrap_model(self.model)
        found.weights = {name: whole(value) for name, value in inner.named_parameters()}
        accelerator.end_training()
        return found

    def _epoch(self) -> None:
        program, accelerator = self.program, self.accelerator
        for batch in self.loader:
            with accelerator.accumulate(self.model):
                self._backward({name: value for name, value in batch.items() if name != "index"})
                if accelerator.sync_gradients:
                    if program.parity == "exact":
                        self.found.losses.append(accelerator.update_loss())
                    self._clip()
                self.optimizer.step()
                if self.schedule is not None:
                    self.schedule.step()
                self.optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            self.found.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            if accelerator.progress.step == program.saves:
                accelerator.save_state(self.folder)
                self.found.has_saved = True
                return

    def _backward(self, batch: dict[str, torch.Tensor]) -> None:
        program, accelerator = self.program, self.accelerator
        if program.loss == "inside" and program.size("cp") * program.size("sp") > 1:
            batch["shift_labels"] = shift_labels(batch["labels"])
        buffers = list(batch.values())
        with accelerator.context_parallel(buffers) as piece:  # without cp and sp, nothing is cut
            if self.pipeline is not None:
                # Without a number, parity="off" weights every process equally, as Accelerate does.
                is_counted = program.parity == "off" and program.loss != "mean"
                labels = batch.get("shift_labels", next_labels(program, batch))
                self.pipeline.step(batch, num_items=float(num_tokens(labels)) if is_counted else None)
                return
            if program.loss == "inside":
                loss = self.model(**batch).loss
                labels = batch.get("shift_labels", next_labels(program, batch))
            else:
                labels = batch["labels"]
                loss = mean_loss_of(logits_of(program, self.model, batch, piece.positions), labels)
            accelerator.backward(loss, num_items=None if program.loss == "mean" else num_tokens(labels))

    def _clip(self) -> None:
        program, accelerator = self.program, self.accelerator
        if program.clipping == "value":
            accelerator.clip_grad_value_(self.model.parameters(), CLIP / 10)
        elif program.clipping != "none":
            kind = math.inf if program.clipping == "inf" else 2.0
            self.found.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), CLIP, kind)))

    def _evaluate(self) -> None:
        program, accelerator = self.program, self.accelerator
        self.model.eval()
        found = []
        with torch.no_grad(), warnings.catch_warnings():
            # Whole sequences on each rank.
            warnings.filterwarnings("ignore", ".*ran outside accelerator.context_parallel", EchelonWarning)
            for batch in self.evaluation_loader:
                index = batch.pop("index")
                labels = next_labels(program, batch)
                if self.pipeline is not None:
                    logits = self.pipeline.evaluate(batch)
                else:
                    logits = logits_of(program, self.model, batch)
                found.append(accelerator.gather_for_metrics((index, sample_losses(logits, labels))))
        losses = torch.full((len(self.evaluation_loader.dataset),), math.nan, dtype=torch.float64)
        for index, values in found:
            assert losses[index].isnan().all(), "a sample was seen twice"
            losses[index] = values
        self.found.evaluations.append(losses)


# ---- level 3 ---------------------------------------------------------------------------------------------------------


class _Watch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, program: MeshProgram, *, goes_on: bool) -> None:
        self.program, self.goes_on = program, goes_on
        self.found = Found()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.rates.append(float(kwargs["optimizer"].param_groups[0]["lr"]))
        if state.global_step == self.program.saves and not self.goes_on:
            control.should_save = control.should_training_stop = True
            self.found.has_saved = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.found.losses.append(logs["loss"])
        if "grad_norm" in logs:
            self.found.norms.append(logs["grad_norm"])
        if "eval_loss" in logs:
            self.found.evaluations.append(torch.tensor([logs["eval_loss"]], dtype=torch.float64))


def _train_by_trainer(program: MeshProgram, folder: str | None, *, goes_on: bool) -> Found:
    model = build(program, seed=1 if goes_on else 0)
    optimizer = make_optimizer(program, model)
    options: dict[str, Any] = {}
    if program.size("pp") > 1:
        options["pipeline_schedule"] = program.schedule_of_stages
        options["pipeline_num_micro_batches"] = program.num_micro_batches
    if program.parity == "exact":
        options |= {"global_batch_size": program.batch_size, "max_micro_batch_size": program.max_micro}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        parity=program.parity,
        parallelism_config=_config(program),
        per_device_train_batch_size=program.batch_size,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=program.accumulation,
        num_train_epochs=program.epochs,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP if program.clipping == "norm" else 0.0,
        train_sampling_strategy="random" if program.shuffle else "sequential",
        dataloader_drop_last=program.drop_last,
        logging_steps=1,
        eval_strategy="epoch" if program.evaluates else "no",
        save_strategy="no",
        data_seed=program.seed + ORDER_SEED,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    watch = _Watch(program, goes_on=goes_on)
    trainer = Trainer(
        model,
        arguments,
        data_collator=collate if program.ragged else None,
        train_dataset=make_rows(program),
        eval_dataset=make_rows(program, evaluation=True) if program.evaluates else None,
        callbacks=[watch],
        optimizers=(optimizer, make_schedule(program, optimizer)),
    )
    trainer.train(resume_from_checkpoint=True if goes_on else None)
    watch.found.weights = {
        name: whole(value) for name, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }
    return watch.found
