"""Faults that are planted in torch and in echelon, of kinds that libraries have had."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "zero1: the parts of the weights are not exchanged after the step",
        "accelerated: optimizer in update 0",
        engine="zero1",
        fault="no_exchange_of_parts",
        tensors="*",
    ),
    mutant(
        "zero1: the schedule does not reach the parts",
        "accelerated: scheduler or optimizer in update 1",
        engine="zero1",
        fault="rates_not_passed_on",
        tensors="*",
    ),
    mutant(
        "fsdp2: gradients divided by the ranks twice",
        "accelerated: reduce in update 0",
        engine="fsdp2",
        fault="gradients_divided_twice",
        tensors="*",
    ),
    mutant(
        "fsdp2: gradients not divided by the ranks",
        "language_model: reduce in update 0",
        engine="fsdp2",
        fault="gradients_not_divided",
        tensors="*",
    ),
    mutant(
        "fsdp2: norm of the rank's own shards",
        "accelerated: clip in update 0",
        engine="fsdp2",
        fault="norm_of_own_shards",
        tensors="*",
    ),
    mutant(
        "fsdp2: norm counted once per rank (wrong by sqrt(shards))",
        "language_model: clip in update 0",
        engine="fsdp2",
        fault="norm_too_large",
        tensors="*",
    ),
    mutant(
        "fsdp2: only the last micro-batch's gradient kept",
        "accelerated: reduce in update 0",
        engine="fsdp2",
        fault="earlier_micro_steps_dropped",
        tensors="*",
    ),
    mutant(
        "ddp: only the last micro-batch's gradient kept",
        "accelerated: reduce in update 0",
        fault="earlier_micro_steps_dropped",
        tensors="*",
    ),
    mutant(
        "num_items of the own rank only",
        "language_model: loss weight or reduce in update 0",
        fault="items_not_summed",
        tensors="*",
    ),
    mutant(
        "the loader repeats its first samples on the last rank",
        "accelerated: data in update 0",
        fault="repeated_samples",
    ),
    mutant(
        "DDP averages over one rank too many", "raw_ddp: reduce in update 0", fault="average_over_too_many", tensors="*"
    ),
    mutant(
        "DistributedSampler ignores the epoch",
        "raw_ddp: data in update 3",
        fault="sampler_without_epoch",
        against="correct",
    ),
    mutant(
        "loaded optimizer state assigned in another order",
        "resume_loop: load in update 6",
        fault="optimizer_state_shifted",
        against="correct",
        resume=(6, 6),
        tensors="*",
    ),
    mutant(
        "torch: clip_grad_norm_ with the norm of the rank's shards",
        "fsdp_loop: clip in update 0",
        fault="torch_norm_of_own_shards",
        tensors="*",
    ),
    mutant(
        "torch: clip_grad_norm_ with the norm of one gradient",
        "raw_ddp: clip in update 0",
        fault="norm_of_first_tensor",
        tensors="*",
    ),
    mutant(
        "DDP: a parameter is missing in the buckets",
        "accelerated: reduce in update 0",
        fault="buckets_without_last_parameter",
        tensors="head.bias",
    ),
    mutant(
        "DDP: no_sync leaks into the next backward pass",
        "raw_ddp: reduce in update 0",
        fault="no_sync_leaks",
        tensors="*",
    ),
    mutant(
        "DDP: weights not sent at the start",
        "level1: initial weights in update -1",
        fault="weights_not_broadcast",
        tensors="*",
    ),
    mutant(
        "DistributedSampler: the last rank reads another rank's shard",
        "raw_ddp: data in update 0",
        fault="sampler_of_neighbours",
    ),
    mutant(
        "Adam counts steps twice on one rank", "level1: optimizer in update 1", fault="steps_counted_twice", tensors="*"
    ),
)
