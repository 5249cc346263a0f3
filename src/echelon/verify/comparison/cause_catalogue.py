"""What each cause means and what to change in the script; ``docs/verify.md`` shows this catalogue as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from echelon.distributed.checks.finding import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCause:
    """A cause that the comparison can recognize."""

    meaning: str
    """One sentence: what happens in the script."""
    remedies: Mapping[str, str]
    """What to change, by the case in which it applies; ``""`` is the general one."""


def _one(meaning: str, do: str = "", **cases: str) -> KnownCause:
    remedies = {"": do, **cases} if do else cases
    return KnownCause(meaning=meaning, remedies=MappingProxyType(remedies))


_TRAINING_MODE = "call model.train() before the training loop and again after each evaluation, on every rank"
_TIE = (
    "tie the parameters again after the model is wrapped, sharded or loaded, for example model.head.weight = "
    "model.embedding.weight, or model.tie_weights() of a transformers model"
)
_SAME_OPTIMIZER = (
    "build the optimizer and its parameter groups with the same arguments on any number of processes: nothing in them may "
    "depend on the rank or on the number of processes"
)
_AFTER_WRAPPING = (
    "build the optimizer from the parameters of the wrapped model, after it is wrapped: model = "
    "DistributedDataParallel(model); optimizer = AdamW(model.parameters()), or model, optimizer = accelerator.prepare(model, optimizer)"
)
_OWN_SEEDS = (
    "after the model is built, give each rank a seed of its own: from echelon import set_seed; set_seed(seed, "
    "device_specific=True), or torch.manual_seed(seed + rank)"
)
_SEEDS_IN_TRAINER = (
    "to give each rank masks of its own, build the Trainer first, and seed before it trains: from echelon import set_seed; "
    "trainer = Trainer(...); set_seed(args.seed, device_specific=True); trainer.train()"
)
_SEED_ONCE = (
    "seed once, before the training loop, not in each step or epoch; when a run resumes, restore the states of the random "
    "number generators from the checkpoint"
)
_CLIP = (
    "clip once per update, after the last backward() of the update (outside no_sync()) and directly before optimizer.step(); with an "
    "Accelerator: `if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), max_norm)`"
)
_CLIP_SHARDS = (
    "call accelerator.clip_grad_norm_(model.parameters(), max_norm), or torch.nn.utils.clip_grad_norm_ on the parameters of the wrapped "
    "model: they add up the squares of all shards"
)
_AVERAGE_WEIGHTS = (
    "update the average once per update, on every rank, after optimizer.step(), for example averaged_model.update_parameters(model); do "
    "not put it under `if rank == 0:`"
)
_SCHEDULER_STEP = "call scheduler.step() once per update, on every rank, directly after optimizer.step()"

_OF_ITEMS = (
    "num_items= must be the number of items that the loss is a mean over on this rank: for tokens, those whose label is not ignored, "
    "num_items=(labels != -100).sum(), without padding, and not summed over the ranks"
)
_ITEMS = {
    "num_items": _OF_ITEMS,
    "compute_loss": 'in compute_loss(), sum the loss (reduction="sum"), and return loss * self.accelerator.num_processes / num_items_in_batch; '
    "add **kwargs to the model's forward(), without which num_items_in_batch is None",
    "compute_loss_func": 'in the function that is passed as compute_loss_func=, sum the loss (reduction="sum") and divide it by its argument '
    "num_items_in_batch",
    "model": 'in the model\'s forward(self, ..., **kwargs), sum the loss (reduction="sum") and divide it by kwargs["num_items_in_batch"], '
    "which the Trainer passes (leave average_tokens_across_devices at True)",
    "library": "leave average_tokens_across_devices at True, and use a model whose forward() takes num_items_in_batch (or **kwargs), or pass "
    "compute_loss_func= to the Trainer",
}

CAUSES: Mapping[str, KnownCause] = MappingProxyType(
    {
        # initial weights
        "ranks begin with different weights": _one(
            "the ranks do not start from the same weights",
            "call torch.manual_seed(seed) with the same seed on every rank before the model is built, or wrap the model with "
            "DistributedDataParallel(model) or accelerator.prepare(model), which send the weights of rank 0 to all ranks",
        ),
        "different initial weights": _one(
            "all ranks start from equal weights, but not from those of one process",
            "call torch.manual_seed(seed) directly before the model is built, with a seed that does not depend on the rank, and load "
            "pretrained weights before the model is wrapped",
        ),
        "tied weights": _one("modules that should share one parameter have copies of their own", _TIE),
        "different parameters": _one(
            "the model has different parameters than on one process",
            "build the same model on any number of processes: no layer may depend on the rank or on the number of processes",
        ),
        # data
        "same samples on every rank": _one(
            "the loader is not sharded: every rank reads the same samples",
            "shard the loader: loader = accelerator.prepare(loader), or DataLoader(dataset, sampler=DistributedSampler(dataset))",
        ),
        "same order in each epoch": _one(
            "the sampler does not shuffle anew in each epoch",
            "call sampler.set_epoch(epoch) at the beginning of each epoch (loader.set_epoch(epoch) with a prepared loader)",
        ),
        "shifted by whole updates": _one(
            "the samples are right, but whole updates too early or too late",
            "skip exactly the batches that are already trained, and start at the saved epoch: each rank skips updates * "
            "gradient_accumulation_steps batches, for example accelerator.skip_first_batches(loader, num_batches)",
        ),
        "shifted by samples": _one(
            "the samples are right, but some samples too early or too late",
            "count the skipped batches of one rank, including the micro-steps of an update that was not complete: "
            "accelerator.skip_first_batches(loader, num_batches)",
        ),
        "sharded twice": _one(
            "the samples of a rank are divided by the number of ranks twice",
            "shard once: pass accelerator.prepare() a loader without DistributedSampler, or keep the DistributedSampler and do not prepare "
            "the loader",
        ),
        "different accumulation window": _one(
            "an update consists of a different number of micro-steps (backward passes) than on one process",
            "step on every rank at the same batches, and after the last batch of an epoch: `if (i + 1) % "
            "accumulation_steps == 0 or i + 1 == len(loader): optimizer.step()`",
        ),
        "padded with repeated samples": _one(
            "samples are repeated to give every rank the same number, and count twice",
            'pass drop_last=True to the DataLoader and the DistributedSampler, or use parity="exact", which repeats no sample',
        ),
        "samples left out": _one(
            "samples of the dataset are read by no rank",
            "compare drop_last= of the DataLoader and the sampler on one process and on several; the shards of all ranks must add up to "
            "len(dataset)",
        ),
        "ranks overlap": _one(
            "several ranks read the same samples",
            "let all ranks shuffle with the same seed and then take different parts: DistributedSampler(dataset, seed=seed) with "
            "sampler.set_epoch(epoch) on every rank, or accelerator.prepare(loader) on a dataset that is the same on every rank",
        ),
        "different contents": _one(
            "the samples have contents that do not occur on one process, for example by random augmentation",
            "in the dataset's __getitem__(i), draw random numbers from a generator that is seeded with seed + i, or switch the augmentation off "
            "to verify the rest",
        ),
        "different order": _one(
            "the samples are those of the dataset, in a different order than on one process",
            "use the same sampler and the same seed on any number of processes (DistributedSampler on one process, too), and do not cut or "
            "shuffle the dataset by hand on each rank",
        ),
        "different number of updates": _one(
            "training ends after a different number of updates than on one process",
            "compare len(loader), drop_last= and the number of skipped batches on one process and on several",
        ),
        # rng
        "same dropout masks on every rank": _one(
            "all ranks have the same seed, so their different samples get the same dropout masks",
            _OWN_SEEDS,
            Trainer=_SEEDS_IN_TRAINER,
        ),
        "same random numbers on every rank": _one(
            "all ranks have the same seed, so the model draws the same random numbers for their different samples",
            _OWN_SEEDS,
            Trainer=_SEEDS_IN_TRAINER,
        ),
        "dropout masks repeat": _one("the same dropout masks are drawn in several updates", _SEED_ONCE),
        "random numbers repeat": _one("the model draws the same random numbers in several updates", _SEED_ONCE),
        "generators not restored": _one(
            "after a resume, the random number generators are not in the state in which the run ended",
            "save the states of random, numpy and torch (torch.get_rng_state()) of each rank, and restore each rank's own; "
            "accelerator.save_state() and load_state() do that",
        ),
        # forward
        "not in training mode": _one(
            "a rank trains with the model in evaluation mode, or steps without a forward pass in training mode",
            _TRAINING_MODE,
        ),
        "training mode differs": _one("the model is in training mode on only one of the two layouts", _TRAINING_MODE),
        "batch statistics per rank": _one(
            "BatchNorm normalizes by the samples of one rank only",
            "before the model is wrapped: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) (it needs GPUs to train; echelon verify "
            "runs it on the CPU), or use torch.nn.GroupNorm",
        ),
        "lower precision": _one(
            "outputs have rounding errors as large as those of float16 or bfloat16",
            "use the same mixed_precision= or torch.autocast on any number of processes, and do not cast the model only when it is wrapped",
        ),
        # loss weight
        "loss averaged per rank": _one(
            "the loss is a mean over the tokens (or samples) of each rank, and the ranks have different numbers of them",
            "pass the number of items that the loss is a mean over: accelerator.backward(loss, num_items=(labels != -100).sum()); without "
            'an Accelerator, sum the loss (reduction="sum"), multiply it by the number of ranks and divide it by the items of all ranks '
            "and micro-steps of the update",
            **_ITEMS,
        ),
        "loss averaged per micro-step": _one(
            "the loss is a mean over the tokens (or samples) of each micro-step, and the micro-steps have different numbers of them",
            "pass the number of items that the loss is a mean over: accelerator.backward(loss, num_items=(labels != -100).sum()); without "
            'an Accelerator, sum the loss (reduction="sum") and divide it by the items of all micro-steps of the update',
            **_ITEMS,
        ),
        "not divided by the micro-steps": _one(
            "with gradient accumulation, the loss is not divided by the number of micro-steps",
            "divide the loss by the number of micro-steps of the update: (loss / accumulation_steps).backward(), or call "
            "accelerator.backward(loss) in place of loss.backward()",
            number_of_ranks="divide the loss by the number of micro-steps of the update, (loss / accumulation_steps).backward(), or call "
            "accelerator.backward(loss) in place of loss.backward(); if it is divided already, do not multiply it by the number of ranks, "
            "which is the same number here",
        ),
        "divided by the micro-steps twice": _one(
            "with gradient accumulation, the loss is divided by the number of micro-steps twice",
            "pass the loss undivided to accelerator.backward(loss), which divides it by gradient_accumulation_steps",
            number_of_ranks="divide the loss by the number of micro-steps once (accelerator.backward(loss) does), and do not divide it by the "
            "number of ranks, which is the same number here: the gradients are averaged over the ranks already",
        ),
        "loss scaled": _one(
            "the loss is multiplied by a factor that one process does not have",
            "remove the factor by which the loss is multiplied or divided before backward(); it must not depend on the rank or on the number "
            "of processes",
            divided_by_ranks="do not divide the loss by the number of ranks, because the gradients are averaged over them already; multiply a "
            "loss that is a sum divided by the items of all ranks by the number of ranks",
        ),
        # backward
        "backward scaled": _one(
            "the loss is right, but each rank's gradient is multiplied by a factor",
            "look for a gradient hook (register_hook), a second backward() with retain_graph=True, or a gradient argument of backward(), and "
            "remove the factor",
        ),
        "gradient missing": _one(
            "a parameter gets no gradient, but gets one on one process",
            "check requires_grad, detach() and torch.no_grad() between this parameter and the loss, and that the parameter exists before the "
            "model is wrapped",
        ),
        "unused on some ranks": _one(
            "not all ranks use a parameter in this update",
            "use the parameter on every rank, or wrap the model with DistributedDataParallel(model, find_unused_parameters=True) "
            "(Accelerator: DistributedDataParallelKwargs(find_unused_parameters=True))",
        ),
        # reduce
        "not reduced": _one(
            "each rank steps with its own gradients: they are not averaged over the ranks",
            "run the last backward() of the update outside no_sync(), with outputs of the wrapped model (model(x), not model.module(x))",
        ),
        "only the last micro-step reduced": _one(
            "only the gradients of the last micro-step are averaged over the ranks",
            "run forward and backward of all micro-steps but the last inside model.no_sync(), and do not change or clear .grad between them",
        ),
        "only some micro-steps reduced": _one(
            "only the gradients of some micro-steps are averaged over the ranks",
            "run forward and backward of all micro-steps but the last inside model.no_sync(), and do not change or clear .grad between them",
        ),
        "scaled differently on each rank": _one(
            "the gradients of the ranks are multiplied by different factors",
            "use the same loss scale and the same divisor on every rank; with torch.amp.GradScaler, build it with the same arguments on every "
            "rank",
        ),
        "gradient changed after the reduction": _one(
            "a rank changes gradients after they were averaged",
            "remove code that changes .grad on one rank only (an if on the rank or on the rank's own data) between backward() and "
            "optimizer.step(), or run it on every rank alike",
        ),
        "summed instead of averaged": _one(
            "the gradients are the sum over the ranks, not the mean",
            "divide the sum by the number of ranks, or reduce with dist.ReduceOp.AVG; DistributedDataParallel and accelerator.prepare() "
            "average by themselves",
        ),
        "averaged twice": _one(
            "the gradients are divided by the number of ranks twice",
            "remove the script's own all_reduce or division: DistributedDataParallel, fully_shard and accelerator.prepare() already average",
        ),
        "summed twice": _one(
            "the gradients are added up over the ranks twice",
            "remove the script's own all_reduce: DistributedDataParallel, fully_shard and accelerator.prepare() already average",
        ),
        "scaled": _one(
            "the gradients are multiplied by a factor, although loss and local gradients are right",
            "look for code between backward() and optimizer.step() that multiplies .grad, and remove it",
        ),
        "micro-steps lost": _one(
            "with gradient accumulation, the gradients of some micro-steps are not in the gradient of the update",
            "call optimizer.zero_grad() only after optimizer.step(), not in each micro-step",
        ),
        "only one rank's gradient": _one(
            "all ranks step with the gradient of one rank",
            "average with dist.all_reduce over all ranks, not with broadcast and not in a part of the process group",
        ),
        "gradients not cleared": _one(
            "the gradient of the previous update is added to that of this update",
            "call optimizer.zero_grad() once after each optimizer.step(), on every rank",
        ),
        "reduced in low precision": _one(
            "the gradients are averaged over the ranks in float16 or bfloat16",
            "average gradients in float32: remove the communication hook (register_comm_hook), and set reduce_dtype=torch.float32 in the "
            "MixedPrecisionPolicy of fully_shard",
        ),
        # clip
        "clipped before the reduction": _one(
            "each rank clips its own gradient before the gradients are averaged over the ranks", _CLIP
        ),
        "norm of one shard": _one(
            "with sharded parameters, each rank clips by the norm of its own shard", _CLIP_SHARDS
        ),
        "clipped by other means": _one(
            "the gradients are clipped by code that torch's clipping functions do not match", _CLIP_SHARDS
        ),
        "clipped a different number of times": _one(
            "clipping functions are called more or less often than on one process", _CLIP
        ),
        "different clipping threshold": _one(
            "max_norm is not that of one process",
            "pass the same max_norm on any number of processes; do not multiply it by the number of ranks or micro-steps",
        ),
        "clipped while scaled": _one(
            "gradients are clipped while they are still multiplied by the loss scale",
            "call scaler.unscale_(optimizer) before clip_grad_norm_(), or use accelerator.clip_grad_norm_(model.parameters(), max_norm)",
        ),
        "norm of the wrong tensors": _one(
            "the clipping norm is not that of the whole gradient",
            "clip all parameters of the model in one call, after the gradients are averaged: "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        ),
        "wrong coefficient": _one(
            "the clipping norm is right, but the gradients are not multiplied by min(1, max_norm / norm)",
            "remove code that changes .grad between clipping and optimizer.step()",
        ),
        # scheduler
        "scheduler stepped num_processes times": _one(
            "the scheduler makes one step per rank in each update",
            f"{_SCHEDULER_STEP}: with Accelerate's API, do not pass the scheduler to prepare(), or pass "
            "step_scheduler_with_optimizer=False to the Accelerator",
        ),
        "learning rates differ between ranks": _one("the ranks step with different learning rates", _SCHEDULER_STEP),
        "learning rate scaled by the number of ranks": _one(
            "the learning rate is multiplied by a number that depends on the number of ranks",
            "use the same learning rate on any number of processes: the reference has the same global batch, so no scaling is needed",
        ),
        "schedule ahead": _one(
            "the schedule of the learning rate is some updates ahead",
            f"{_SCHEDULER_STEP}; when a run resumes, restore it with scheduler.load_state_dict(...)",
        ),
        "schedule behind": _one(
            "the schedule of the learning rate is some updates behind",
            f"{_SCHEDULER_STEP}; when a run resumes, restore it with scheduler.load_state_dict(...)",
        ),
        "different schedule": _one(
            "the learning rates follow a different schedule than on one process",
            f"{_SCHEDULER_STEP}, build it with the same arguments on any number of processes, and restore it when a run resumes",
        ),
        "different optimizer settings": _one(
            "the optimizer has different settings than on one process", _SAME_OPTIMIZER
        ),
        # optimizer
        "step skipped": _one(
            "a loss scaler skips the step on some ranks only",
            "skip the step on all ranks if one of them has infinite gradients: use the GradScaler of the Accelerator, or all_reduce the "
            "scaler's found_inf over the ranks before the step",
        ),
        "stepped a different number of times": _one(
            "the optimizer makes a different number of steps than on one process, or on some ranks only",
            "call optimizer.step() once per update on every rank, not under a condition on the rank or on its data",
        ),
        "parameters not in the optimizer": _one(
            "parameters of the model are in no parameter group of the optimizer", _AFTER_WRAPPING
        ),
        "weights not updated": _one(
            "the optimizer does not change parameters that it changes on one process", _AFTER_WRAPPING
        ),
        "averaged weights": _one("a running average of the weights is not that of one process", _AVERAGE_WEIGHTS),
        "ranks step apart": _one(
            "the ranks have equal gradients, but unequal weights after the step",
            "use equal optimizer settings and states on every rank, and remove code that changes weights on one rank only",
        ),
        "optimizer state of another parameter": _one(
            "the optimizer state of one parameter is that of another",
            "keep the order of the parameters when the state is loaded: build the optimizer from the same parameter list before "
            "optimizer.load_state_dict(...)",
        ),
        "step scaled": _one(
            "the weights move by a multiple of what the same gradients cause on one process",
            "call optimizer.step() once per update; look for a second optimizer or a second step with the same parameters",
        ),
        "step with old gradients": _one(
            "the optimizer steps with the gradients of the previous update",
            "call optimizer.step() after the last backward() of the update, not before it",
        ),
        # buffers
        "buffers differ between ranks": _one(
            "buffers, such as BatchNorm's running statistics, differ between the ranks",
            "convert the model with torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before it is wrapped, or let DistributedDataParallel "
            "send the buffers of rank 0 (broadcast_buffers=True, the default), and update other buffers on every rank",
        ),
        "stale buffers": _one(
            "buffers are equal on all ranks, but not those of one process",
            "update buffers on every rank in each update (BatchNorm: SyncBatchNorm), call model.eval() for evaluations, and load "
            "buffers together with the weights",
        ),
        # save and load
        "state missing from the checkpoint": _one(
            "the checkpoint does not contain a part of the training state",
            "save model, optimizer and scheduler (state_dict() of each, on every rank that holds a shard), or call accelerator.save_state()",
        ),
        "wrong state saved": _one(
            "the checkpoint contains values that the run did not have before or after this update",
            "save after optimizer.step(), from the model that is trained (not a copy), on every rank that holds a shard",
        ),
        "not restored": _one(
            "after a resume, a part of the saved training state is not loaded",
            "load model, optimizer, scheduler and random number generators before training continues, on every rank, or call "
            "accelerator.load_state()",
        ),
        "state of a different update": _one(
            "a resumed run starts from the weights of another update",
            "save after optimizer.step(), and load the newest checkpoint",
        ),
        "PARTS not restored": _one(
            "after a resume, the named parts of the training state have different values than were saved (PARTS: weights, buffers, optimizer "
            "state, learning rates, position in the data)",
            "load these parts on every rank, after the model is wrapped and the optimizer is built: load_state_dict(...) of each, with "
            "strict=True, and without a change of dtype",
        ),
        # no known cause
        "no known cause: forward": _one(
            "a module's output differs, and no cause above explains it",
            "compare the inputs, the training mode and the buffers of this module on the ranks named; outputs must not depend on the other "
            "samples of the batch, such as padding to the longest",
        ),
        "no known cause: loss": _one(
            "the losses differ, and the outputs could not be compared sample by sample",
            "check that what the model and the loss function compute for a sample does not depend on the other samples of its batch",
        ),
        "no known cause: backward": _one(
            "the gradients of the ranks are wrong before they are averaged",
            "check labels and loss on each rank, gradient hooks, activation checkpointing, custom autograd functions, and collectives in "
            "backward()",
        ),
        "no known cause: gradients": _one(
            "gradients differ, and no cause above explains it",
            "look for code that changes .grad between backward() and optimizer.step() on several processes only",
        ),
        "no known cause: learning rates": _one(
            "learning rates differ, and no cause above explains it",
            "print scheduler.get_last_lr() in each update on one process and on several, and compare",
        ),
        "no known cause: optimizer": _one(
            "weights or optimizer states differ after the step, although the gradients are equal",
            "compare the optimizer's settings and weight decay groups, and look for other code that changes weights (an averaged model, a copy)",
        ),
    }
)
"""Causes by name, in the order of the stages of an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyCause:
    """A hypothesis that the recorded values support."""

    name: str
    """Short name, as in ``Finding.cause``."""
    why: str
    do: str
    stage: Stage | None = None
    """The stage at fault, if it is not the one whose values differ (a loss that is averaged per rank shows in ``reduce``)."""
    ranks: list[int] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    """Tensors at fault, if these are not simply those that differ."""
    ratio: float | None = None
    line: str = ""


def likely_cause(key: str, case: str = "", *, why: str, name: str | None = None, **facts: Any) -> LikelyCause:
    """Return the cause ``key`` of the catalogue with the values that support it.

    Args:
        key: its name in ``CAUSES``.
        case: which of its remedies fits the script.
        why: the cause in words, with the values that support it.
        name: the name that is shown, if it is not ``key``.
        facts: the other fields of ``LikelyCause``.
    """
    shown = "" if key.startswith("no known cause") else key
    return LikelyCause(name=shown if name is None else name, why=why, do=CAUSES[key].remedies[case], **facts)
