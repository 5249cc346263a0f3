"""What a drawn program may be refused for, what may be warned about, and the faults that are known and still open."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.programs.parts import Rows, make_loader
from tests.programs.program import Case, Layout, Program
from tests.reference import batches_of


@dataclass(frozen=True)
class _Refusal:
    name: str
    when: Callable[[Program, Layout], bool]
    pattern: str
    """Of echelon's error."""


_REFUSALS: list[_Refusal] = [
    _Refusal(
        "sparse embeddings cannot be sharded",
        lambda p, at: p.model == "sparse" and (at.engine or "").startswith("fsdp2"),
        "is an embedding with sparse=True",
    ),
    _Refusal(
        "shard() shards data with an index",
        lambda p, at: at.level == 1 and p.data == "iterable",
        "shard\\(\\) cannot shard an iterable dataset",
    ),
    _Refusal(
        "shard() cuts batches of a batch size",
        lambda p, at: at.level == 1 and p.order == "batch_sampler",
        "expected a loader with a batch size and torch's own batch sampler",
    ),
    _Refusal(
        "a Trainer needs a batch to train on",
        lambda p, at: at.level == 3 and p.drop_last,
        "there is no batch to train on",
    ),
    _Refusal(
        "a shard of a Trainer's batch is larger than a process takes",
        lambda p, at: at.level == 3 and at.parity == "bitwise",
        "max_micro_batch_size=. is smaller than a shard: a batch of",
    ),
    _Refusal(
        "a stream without state cannot be entered in its middle",
        lambda p, at: p.data == "iterable" and p.saves is not None and at.parity != "off" and not p.replays,
        "an iterable dataset without state_dict.. cannot seek",
    ),
    _Refusal(
        "bitwise sums are dense",
        lambda p, at: p.model == "sparse" and at.parity == "bitwise",
        "its gradients are sparse",
    ),
    _Refusal(
        "an optimizer that was not prepared has no updates in the exact modes",
        lambda p, at: not p.is_prepared and at.parity != "off",
        "was not prepared by this Accelerator",
    ),
    _Refusal(
        "an optimizer that was not prepared holds no shards",
        lambda p, at: not p.is_prepared and (at.engine or "").startswith("fsdp2"),
        "that prepare\\(\\) replaced with sharded ones",
    ),
    _Refusal(
        "parity off goes on in mid-epoch on the same number of processes",
        lambda p, at: p.saves is not None and at.parity == "off",
        "the checkpoint was saved during an epoch with . process",
    ),
    _Refusal(
        "LBFGS needs whole parameters",
        lambda p, at: p.optimizer == "lbfgs" and (at.engine or "").startswith(("fsdp2", "zero1")),
        "LBFGS (cannot step sharded parameters|needs whole parameters)|the state of LBFGS cannot be sharded",
    ),
    _Refusal(
        "LBFGS evaluates its closure again after the batches of an update are gone",
        lambda p, at: p.optimizer == "lbfgs",
        "LBFGS evaluates its closure again with different parameters",
    ),
    _Refusal(
        "optimizers with closures take turns in a batch",
        lambda p, at: p.closure and p.optimizers == 2 and at.parity == "bitwise",
        "a second loss for the same batch was computed after an optimizer's step",
    ),
    _Refusal(
        "closures of two optimizers in an update of several micro-steps",
        lambda p, at: (
            p.closure
            and p.optimizers == 2
            and (p.accumulation > 1 or at.max_micro is not None or at.parity == "bitwise")
        ),
        "another optimizer also evaluated a closure",
    ),
    _Refusal(
        "zipped batches of other sizes, cut in pieces",
        lambda p, at: p.zipped > 0 and at.parity != "off" and _sizes_differ(p),
        "two training loaders are read together, but their micro-batches do not match|a training loader yielded a "
        "batch in the middle of another loader's update|gather: the ranks do not pass the same structure|"
        "several batches were fetched before the first of them is trained",
    ),
    _Refusal(
        "split_batches needs a batch size that divides",
        lambda p, at: p.split_batches and (p.batch_size % at.world_size > 0 or p.zipped % at.world_size > 0),
        "split_batches=True requires a batch size",
    ),
    _Refusal(
        "batches of other lengths cannot be joined by rank zero",
        lambda p, at: at.world_size > 1 and p.collate == "padded" and (p.dispatches or p.data == "iterable"),
        "cannot be concatenated into one for all ranks",
    ),
    _Refusal(
        "dispatched columns that are not by sample",
        lambda p, at: p.beside != "no" and (p.dispatches or (p.dispatches is None and p.data == "iterable")),
        "rank zero's batch cannot be split across ranks, because its columns",
    ),
    _Refusal(
        "a stream is not divided inside a loader that reads in its own way",
        lambda p, at: p.subclass and p.data == "iterable" and (at.parity != "off" or p.dispatches is False),
        "Halved reads its batches in its own __iter__",
    ),
    _Refusal(
        "gather of batches of other sizes",
        lambda p, at: (
            at.world_size > 1
            and at.parity == "off"
            and (p.order == "batch_sampler" or not p.even_batches or (p.zipped > 0 and p.order == "buckets"))
        ),
        "gather: the ranks do not pass the same structure",
    ),
    _Refusal(
        "micro-steps of an exact update, or uneven shares, fetched ahead",
        lambda p, at: p.fetches > 1 and at.parity != "off",
        "several batches were fetched before the first of them is trained|was called outside a prepared DataLoader's loop|"
        "yielded a batch in the middle|earlier micro-steps' gradients were|after a loader's iterator was closed|"
        "a second loss for the same batch was computed after|the other batches would be ignored|"
        "of a batch that is trained outside of its loader's loop|the latest one was trained outside of it",
    ),
    _Refusal(
        "ZeRO stages 1 and 2 take no group of frozen parameters",
        lambda p, at: p.frozen_group and at.engine in ("deepspeed stage 1", "deepspeed stage 2"),
        "all parameters in parameter group 0 of the optimizer are frozen",
    ),
    _Refusal(
        "windows of split batches that the end of a pass would leave open",
        lambda p, at: p.splits == "counted" and p.accumulation > 1,
        "the last update of this pass has only . of . micro-steps|accumulate\\(\\) was entered again after the last batch of a loader",
    ),
    _Refusal(
        "ranks with other numbers of batches",
        lambda p, at: at.world_size > 1 and at.parity == "off" and not p.even_batches,
        "the ranks have different numbers of batches|have no batch to train on, but rank|but other ranks have more batches and continue their update",
    ),
]

# (item, when): drawn, and left out until its repair has landed.
_OPEN: list[tuple[str, Callable[[Case], bool]]] = []

# Of torch, about the user's own model; of echelon, about what costs time and changes nothing.
_EXPECTED_WARNINGS: list[str] = [
    "FSDP2-wrapped module .* returned a view tensor",
    "Sparse invariant checks are implicitly disabled",
    "EchelonWarning: sharding settings have no effect on a single process",  # fsdp= of a Trainer
    "EchelonWarning: the last backward pass did not synchronize",
    # of a layer that is unfrozen after DistributedDataParallel was made
    "EchelonWarning: this step uses Net gradients that were not averaged across ranks",
    "EchelonWarning: .*was not prepared by this Accelerator",
    "EchelonWarning: . batches of iterable data were read again",
    "EchelonWarning: .* contains RNG states for . process",
    # of a zip() that is left after its first step: then nobody reads on, who could be told by an error
    "EchelonWarning: two training loaders are read together, but their micro-batches do not match.*\\(for the last "
    "batches\\)",
    # of optimizers with closures, before the error about the closures of both
    "EchelonWarning: a second loss for the same batch was computed after an optimizer's step\\(\\), which is "
    "postponed to the last",
]


_WARNINGS_OF_SOME: list[tuple[Callable[[Program], bool], str]] = [
    (
        lambda p: p.bf16,
        "trained parameters of .* are bfloat16|mixed_precision='bf16', but . of . trained parameters are bfloat16",
    ),
    (lambda p: p.adapter != "no", "belong to no adapter"),
    (lambda p: p.frozen_group, "DeepSpeed removes parameter groups without parameters"),
    (lambda p: p.retries == "batch_size", "out of memory with a batch size of"),
    (lambda p: p.retries == "again", "a new training begins|the update's gradients are dropped"),
    (
        lambda p: p.leaves_out or p.retries == "again",
        "step\\(\\) was called in an earlier micro-step .* but not in the last one",
    ),
]


def _sizes_differ(program: Program) -> bool:
    """Tell whether the two batches of an iteration have, or may have, other numbers of samples: the end of a stream is unknown."""
    if program.data == "iterable" and program.num_samples % program.batch_size:
        return True
    rows = range(program.num_samples)
    loader = make_loader(program, Rows(program))
    sizes = (
        [len(batch) for batch in loader.batch_sampler or ()]
        if program.order in ("batch_sampler", "buckets")
        else list(map(len, batches_of(rows, program.batch_size, drop_last=program.drop_last)))
    )
    return any(a != len(b) for a, b in zip(sizes, batches_of(rows, program.zipped)))


def known_open(case: Case) -> str | None:
    """Return the number of the fault that this case would meet."""
    return next((item for item, when in _OPEN if when(case)), None)


def refusal_of(program: Program, layout: Layout, error: str) -> str | None:
    """Return the name of the documented refusal that ``error`` is, where the program gives cause for it."""
    for refusal in _REFUSALS:
        if refusal.when(program, layout) and re.search(refusal.pattern, error, re.DOTALL):
            return refusal.name
    return None


def is_expected_warning(program: Program, category: str, text: str) -> bool:
    """Tell whether a warning is one that the program may give."""
    patterns = [*_EXPECTED_WARNINGS, *(pattern for when, pattern in _WARNINGS_OF_SOME if when(program))]
    return any(re.search(pattern, f"{category}: {text}") for pattern in patterns)


def excuse_of(case: Case, texts: Sequence[str]) -> str | None:
    """Return what a warning named as the reason of a difference."""
    is_named = any("that were not averaged across ranks" in text for text in texts)
    if case.layout.level == 1 and case.program.unfreezes is not None and is_named:
        return "torch's DistributedDataParallel does not average a layer that is unfrozen later"
    if not case.program.is_prepared and any("was not prepared by this Accelerator" in text for text in texts):
        return "an optimizer that was not prepared steps in every micro-step"
    if case.program.zipped and case.program.breaks == 1 and any("micro-batches do not match" in text for text in texts):
        return "zipped batches of other sizes, cut in pieces, and left after the first step"
    return None
