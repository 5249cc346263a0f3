"""What a drawn training program is: a flat record of features, each with a plain default, drawn from one integer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

TRAINERS, NATIVE = 0.2, 0.1  # of all programs: a Trainer (level 3), a DistributedDataParallel (level 1)


@dataclass(frozen=True, kw_only=True)
class Program:
    """One training script. Every default is the plainest choice, so that the repr of a program shows what it has."""

    seed: int = 0
    epochs: int = 2
    # ---- data
    num_samples: int = 12
    batch_size: int = 4
    drop_last: bool = False
    data: str = "map"  # map | iterable
    order: str = "sequential"  # sequential | shuffle | generator | sampler | batch_sampler | buckets
    collate: str = "tuple"  # tuple | dict | padded
    num_workers: int = 0
    even_batches: bool = True
    split_batches: bool = False
    dispatches: bool | None = None  # DataLoaderConfiguration(dispatch_batches=)
    seedable: bool = False  # DataLoaderConfiguration(use_seedable_sampler=)
    zipped: int = 0  # the batch size of a second loader that is read in the same loop
    already_sharded: bool = False  # the sampler is a DistributedSampler
    subclass: bool = False  # the loader is of a class with its own __iter__, which changes the batches
    beside: str = "no"  # no | constant | rows: a column that has not one row for each sample
    # ---- model
    model: str = "mlp"  # mlp | tied | frozen | sparse | shared | branches | scalar
    output: str = "tensor"  # tensor | tuple | dict | model_output | dataclass | namedtuple
    unfreezes: int | None = None  # the epoch before which the frozen layer is unfrozen
    frozen_group: bool = False  # the frozen layer has a parameter group of its own
    # ---- loss
    loss: str = "mean"  # mean | items | two | inside; of a Trainer also own | func | model_items | sentinel
    # ---- optimizer
    optimizer: str = "sgd"  # sgd | momentum | adamw | adagrad | rmsprop | lbfgs
    groups: int = 1  # parameter groups
    optimizers: int = 1
    made: str = "before"  # before: prepare(model, optimizer); after: from the prepared model; apart: in two calls; first: it comes first
    is_prepared: bool = True
    closure: bool = False
    schedule: str = "none"  # none | step | lambda | cosine; of a Trainer also linear | warmup, by its arguments
    accumulation: int = 1
    accumulates: bool = True  # the loop says accumulate()
    clipping: str = "none"  # none | norm | inf | value
    set_to_none: bool = True
    clears_first: bool = False  # zero_grad() before the backward pass
    guards: bool = False  # if accelerator.sync_gradients: clip, step, clear
    no_sync: bool = False  # windows that the loop counts by itself
    # ---- loop
    evaluates: str = "no"  # no | epoch | middle
    breaks: int | None = None  # after so many updates of each epoch
    breaks_within: bool = False  # and a micro-step of the next one
    skips: bool = False  # `continue` for every third batch
    peeks: bool = False  # a forward pass under no_grad between forward and backward
    saves: int | None = None  # after so many updates the run is saved, and goes on in another start
    fetches: int = 1  # batches that are fetched before the first of them is trained
    fp16: bool = False  # a loss scale; float64 is left alone by autocast
    reads: bool = False  # gradients are unscaled and measured in each micro-step, again and again
    retries: str = "no"  # no | memory | batch_size | second | again: a training before this one ends in a window
    returns: str = "no"  # no | update | window | nan: load_state() of what was saved after the first update
    returns_after: int = 1  # updates
    leaves_out: bool = False  # every third update is cleared after its gradients have been clipped
    splits: str = (
        "no"  # no | divided | counted: each batch in two parts, by hand; of one micro-step, or each a micro-step
    )
    replays: bool = False  # DataLoaderConfiguration(replay_iterable=True)
    float32: bool = False
    # ---- of a Trainer
    by_name: bool = False  # the optimizer is named in its arguments
    max_steps: int | None = None
    says_global: bool = True  # global_batch_size is given, in the exact modes
    labels: str = "vector"  # vector | ids | number | one | int32 | hot: what the default collator makes labels of
    late: str = "no"  # no | loss_kwargs | label_names | can_return_loss: set by a subclass after super().__init__()
    eval_sets: bool = False  # two sets without names are evaluated in turn after the training
    adapter: str = "no"  # no | default | named | two: of PEFT; the resumed run has other adapters
    loaded: str = ""  # bfloat16 | float16: the dtype of the model and its data
    bf16: bool = False

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Program({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a program is started."""

    world_size: int = 1
    level: int = 2
    parity: str = "off"
    engine: str | None = (
        None  # None: chosen by the number of processes; fsdp2 and deepspeed with the stage of ZeRO behind them
    )
    max_micro: int | None = None
    shards: int | None = None

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Layout({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, a layout, and another one: of the second start, or (bitwise) of a run that must have the same bits."""

    program: Program
    layout: Layout
    other: Layout | None = None

    def __repr__(self) -> str:
        other = "" if self.other is None else f", other={self.other!r}"
        return f"Case(program={self.program!r}, layout={self.layout!r}{other})"

    def script(self) -> str:
        """Return a program that runs this case alone."""
        return (
            "from tests.programs.program import Case, Layout, Program\n"
            "from tests.programs.runner import explain\n\n"
            f"print(explain({self!r}))\n"
        )


def draw_case(seed: int) -> Case:
    """Return the case of ``seed``: the same on every machine and in every version of Python."""
    draw = random.Random(f"program {seed}")
    kind = draw.random()
    if kind < NATIVE:
        return Case(program=_draw_native(draw, seed), layout=Layout(world_size=draw.choice([1, 2, 2, 3, 3]), level=1))
    if kind < NATIVE + TRAINERS:
        program = _draw_trainer(draw, seed)
        layouts = _draw_layouts(draw, program, level=3)
        if "other" in layouts and program.saves is None:
            program = replace(program, says_global=True)  # else another number of processes is another batch
        program = _with_trainer_kinds(random.Random(f"trainer kinds {seed}"), program, layouts["layout"])
        return Case(program=program, **layouts)
    program = _with_kinds(random.Random(f"kinds of {seed}"), _draw_program(draw, seed))
    layouts = _draw_layouts(draw, program, level=2)
    if layouts["layout"].parity == "off":
        program = _with_windows(draw, program)
    program = _with_pending_state(random.Random(f"pending {seed}"), program, **layouts)
    program = _with_returns(random.Random(f"returns {seed}"), program, **layouts)
    return Case(program=program, **layouts)


def draw_deepspeed_case(seed: int) -> Case:
    """Return a case of level 2 for the engine deepspeed, with what the library supports."""
    draw = random.Random(f"deepspeed {seed}")
    program = _with_kinds(random.Random(f"kinds of {seed}"), _draw_program(random.Random(f"program {seed}"), seed))
    stage = draw.choice([0, 1, 2, 3])
    changes: dict[str, Any] = {
        "float32": True,  # float64 is refused, and so is a second optimizer, or one that is not prepared with its model
        "optimizer": draw.choice(["sgd", "momentum"]),  # others divide noise by noise
        "optimizers": 1,
        "made": "before",
        "is_prepared": True,
        "closure": False,
        "even_batches": True,  # uneven inputs are refused
        "unfreezes": None,  # the library trains what it was given
    }
    if program.model == "sparse":
        changes["model"] = "mlp"  # the library's own sparse gradients are another feature, of its config
    if program.clipping in ("inf", "value") and stage:
        changes["clipping"] = "norm"  # gradients are not exposed
    program = _possible(replace(program, **changes))
    worlds = [draw.choice([1, 2, 2]) for _ in range(2)]
    parity = draw.choice(["off", "off", "exact"])
    engines = [
        f"deepspeed stage {stage}",
        draw.choice([f"deepspeed stage {draw.choice([0, 1, 2, 3])}", "ddp", "zero1", "fsdp2 stage 3"]),
    ]
    layout, other = (
        Layout(
            world_size=world_size,
            parity=parity,
            engine=engine,
            max_micro=draw.choice([None, 1, 2]) if parity == "exact" else None,
        )
        for world_size, engine in zip(worlds, engines)
    )
    if other.world_size == 1 and not (other.engine or "").startswith("deepspeed"):
        other = replace(other, engine=None)
    if parity == "off":
        program = _with_windows(draw, program)
    program = _with_pending_state(random.Random(f"pending {seed}"), program, layout)
    program = _with_returns(random.Random(f"returns {seed}"), program, layout)
    if program.retries == "again":
        program = replace(program, retries="second")  # one model is trained until free_memory()
    return Case(program=program, layout=layout, other=None if program.saves is None else other)


def _with_pending_state(draw: random.Random, program: Program, layout: Layout, other: Layout | None = None) -> Program:
    """Return the program with more that is pending in an update: drawn apart, so that a seed keeps the rest of its program."""
    changes: dict[str, Any] = {}
    is_fp16 = draw.random() < 0.25
    in_fp16 = is_fp16 and not (program.closure or program.float32 or program.model == "sparse") and program.is_prepared
    if in_fp16:
        # fully_shard computes in fp16, of whose noise adaptive optimizers make steps, and the other engines in float64.
        computes = {"fsdp2" in (at.engine or "") for at in (layout, other or layout)}
        is_exact = computes == {False} or program.optimizer in ("sgd", "momentum")
        changes["fp16"] = program.saves is None and is_exact and len(computes) == 1
    if draw.random() < 0.25 and not program.closure and program.model != "sparse":
        changes["reads"] = True
    if draw.random() < 0.15 and program.saves is None and not program.closure:
        changes["retries"] = "memory"
    fetches = draw.choice([2, 3, 4])
    is_plain = (
        not (program.skips or program.zipped or program.no_sync) and program.breaks is None and program.saves is None
    )
    if draw.random() < 0.3 and is_plain and program.even_batches and program.evaluates != "middle":
        changes["fetches"] = fetches
    return replace(program, **changes)


def _with_returns(draw: random.Random, program: Program, layout: Layout, other: Layout | None = None) -> Program:
    """Return the program with returns to a checkpoint, updates that the loop skips, and batches that it splits."""
    changes: dict[str, Any] = {}
    if program.retries != "no":
        changes["retries"] = draw.choice(["memory", "batch_size", "second", "again"])
    is_plain = not (program.skips or program.zipped or program.no_sync or program.breaks or program.saves)
    is_plain = is_plain and program.is_prepared and not program.closure
    kind, place = draw.choice(["update", "window", "nan"]), draw.choice([1, 2, 3])
    if draw.random() < 0.2 and is_plain:
        changes |= {"returns": kind, "returns_after": place + 1 if kind == "update" else place}
    if draw.random() < 0.15 and is_plain:
        changes["leaves_out"] = True
    kind = draw.choice(["divided", "counted"])
    is_mean = program.loss != "items" and program.collate != "padded" and program.model != "branches"
    if draw.random() < 0.3 and is_plain and is_mean and program.fetches == 1:
        is_even = program.order not in ("batch_sampler", "buckets") and program.even_batches and program.data == "map"
        is_even = is_even and not (program.split_batches or program.dispatches or program.already_sharded)
        # Ranks with other numbers of parts would call backward() at other times.
        is_divided = kind == "divided" and (layout.world_size == 1 or (layout.parity == "off" and is_even))
        is_counted = kind == "counted" and layout.parity == "off" and is_even and program.evaluates != "middle"
        if (is_divided and (other is None or other.world_size == 1)) or is_counted:
            changes["splits"] = kind
    return replace(program, **changes)


def _with_windows(draw: random.Random, program: Program) -> Program:
    """Return the program with windows of the script's own, or one that is left in a window: with Accelerate's meaning only."""
    is_plain = not (program.closure or program.zipped or program.guards or program.skips or program.saves)
    if not is_plain or program.accumulation == 1 or not program.is_prepared:
        return program
    kind = draw.random()
    if kind < 0.3 and program.breaks is not None and program.order != "generator":
        return replace(program, breaks_within=True)
    if kind > 0.75 and program.data == "map" and program.loss != "items" and program.even_batches:
        return replace(program, no_sync=True, accumulates=False, clears_first=False)
    return program


def _with_kinds(draw: random.Random, program: Program) -> Program:
    """Return the program with other kinds of batches, loaders and groups; drawn apart, so that the rest of it stays."""
    changes: dict[str, Any] = {}
    if program.order == "batch_sampler" or (program.data == "map" and draw.random() < 0.12):
        changes["order"] = draw.choice(["batch_sampler", "buckets", "buckets"])
    changes["subclass"] = draw.random() < 0.12
    changes["beside"] = draw.choice(["constant", "rows"]) if draw.random() < 0.12 else "no"
    if program.model == "frozen" or draw.random() < 0.05:
        changes |= {"model": "frozen", "frozen_group": program.optimizer != "lbfgs" and draw.random() < 0.6}
    return _possible(replace(program, **changes))


def _draw_native(draw: random.Random, seed: int) -> Program:
    """Return a program whose loop wraps its model in torch's DistributedDataParallel, and cuts its loaders by ``shard()``."""
    program = _draw_program(draw, seed)
    changes: dict[str, Any] = {"made": "after" if program.made == "after" else "before", "is_prepared": True}
    changes |= {"even_batches": True, "split_batches": False, "dispatches": None, "zipped": 0, "accumulates": True}
    changes |= {"saves": None, "replays": False, "guards": False}
    if program.closure or program.loss == "items" or program.skips:
        changes["accumulation"] = 1  # who divides by items that are not read yet would have to read ahead
    cannot_be_cut = program.data == "iterable" or program.order == "batch_sampler"
    if cannot_be_cut and draw.random() < 0.8:
        changes |= {"data": "map", "order": "shuffle"}
    return replace(program, **changes)


def _draw_trainer(draw: random.Random, seed: int) -> Program:
    """Return a program whose loop is a Trainer's."""

    def sometimes(share: float, *values: Any, usual: Any) -> Any:
        return draw.choice(values) if draw.random() < share else usual

    is_iterable = draw.random() < 0.15
    loss = draw.choice(["inside", "inside", "own", "two", "func", "items", "items", "model_items"])
    optimizer = draw.choice(["sgd", "momentum", "momentum", "adamw", "adamw", "adagrad", "rmsprop"])
    model = draw.choice(["mlp", "mlp", "mlp", "tied", "frozen", "sparse", "shared", "branches", "scalar"])
    if model == "sparse" and optimizer not in ("sgd", "adagrad"):
        optimizer = "sgd"
    by_name = model != "sparse" and draw.random() < 0.3
    is_counted = loss in ("items", "model_items")
    evaluates = sometimes(0.35, "epoch", "middle", usual="no")
    saves = sometimes(0.15, 1, 2, 3, 5, usual=None)
    return Program(
        seed=seed,
        epochs=draw.choice([1, 1, 2, 2, 3]),
        num_samples=draw.choice([1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13]),
        batch_size=draw.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 8]),
        drop_last=evaluates == "no" and draw.random() < 0.2,  # dataloader_drop_last is for evaluations, too
        data="iterable" if is_iterable else "map",
        order="sequential" if is_iterable else draw.choice(["sequential", "shuffle", "shuffle"]),
        collate=draw.choice(["dict", "padded"]) if is_counted else draw.choice(["dict", "dict", "tuple"]),
        num_workers=sometimes(0.02, 1, usual=0),
        even_batches=draw.random() > 0.04,
        split_batches=draw.random() < 0.06,
        dispatches=sometimes(0.1, True, False, usual=None),
        model=model,
        output=sometimes(0.7, "tuple", "dict", "model_output", "dataclass", "namedtuple", usual="tensor"),
        loss=loss,
        optimizer=optimizer,
        groups=sometimes(0.2, 2, usual=1) if not by_name else 1,
        by_name=by_name,
        schedule=sometimes(0.6, "linear", "warmup", *([] if by_name else ["step", "lambda", "cosine"]), usual="none"),
        clipping="norm" if model != "sparse" and draw.random() < 0.5 else "none",
        accumulation=sometimes(0.5, 2, 3, 4, usual=1),
        max_steps=draw.choice([2, 3, 4, 6]) if is_iterable or draw.random() < 0.2 else None,
        evaluates=evaluates,
        breaks=None if is_iterable or saves is not None else sometimes(0.06, 1, 2, usual=None),
        saves=saves,
        says_global=draw.random() < 0.6,
        float32=optimizer in ("sgd", "momentum") and draw.random() < 0.2,
    )


def _with_trainer_kinds(draw: random.Random, program: Program, layout: Layout) -> Program:
    """Return the program with other labels, subclasses, adapters and dtypes; drawn apart, so that the rest of it stays."""
    changes: dict[str, Any] = {}
    if draw.random() < 0.6 and (program.loss in ("items", "model_items") or program.collate != "dict"):
        program = replace(program, loss="inside", collate="dict")
    is_plain = program.loss not in ("items", "model_items") and program.collate == "dict"
    kind = draw.choice(["labels", "labels", "late", "late", "sentinel", "adapter", "adapter", "loaded", "no"])
    label, late = (
        draw.choice(["ids", "number", "one", "int32", "hot"]),
        draw.choice(["loss_kwargs", "label_names", "can_return_loss"]),
    )
    adapter, loaded = draw.choice(["default", "named", "two"]), draw.choice(["bfloat16", "bfloat16", "float16"])
    if draw.random() < 0.25 and program.saves is None:
        changes |= {"eval_sets": True, "drop_last": False}  # which is for evaluations, too
        if draw.random() < 0.2 and program.data == "map":
            changes["num_workers"] = 1
    if kind == "labels" and is_plain:
        changes["labels"] = label
    elif kind == "late" and is_plain:
        changes |= {"late": late, "loss": "inside"}
    elif kind == "sentinel" and is_plain:
        changes["loss"] = "sentinel"
    elif kind == "adapter" and is_plain and program.model in ("mlp", "scalar", "branches"):
        changes |= {"adapter": adapter, "groups": 1}
        if program.data == "map" and program.breaks is None and draw.random() < 0.5:
            changes["saves"] = program.saves or draw.choice([1, 2, 3])
    elif kind == "loaded" and is_plain and layout.parity != "bitwise" and program.saves is None:
        is_smooth = program.optimizer in ("sgd", "momentum")  # others divide noise by noise
        if is_smooth and program.model != "sparse":
            changes |= {"loaded": loaded, "float32": False, "bf16": loaded == "bfloat16" and draw.random() < 0.5}
    if changes.get("saves"):
        changes["eval_sets"] = False
    return replace(program, **changes)


def _draw_program(draw: random.Random, seed: int) -> Program:
    def sometimes(share: float, *values: Any, usual: Any) -> Any:
        return draw.choice(values) if draw.random() < share else usual

    is_iterable = draw.random() < 0.15
    data: dict[str, Any] = {
        "num_samples": draw.choice([1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13]),
        "batch_size": draw.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 8]),
        "drop_last": draw.random() < 0.12,
        "data": "iterable" if is_iterable else "map",
        "order": "sequential"
        if is_iterable
        else draw.choice(["sequential", *["shuffle"] * 3, "generator", "sampler", "batch_sampler"]),
        "collate": sometimes(0.3, "dict", "padded", usual="tuple"),
        "num_workers": sometimes(0.02, 1, usual=0),
        "even_batches": draw.random() > 0.05,
        "split_batches": draw.random() < 0.08,
        "dispatches": sometimes(0.1, True, False, usual=None),
        "seedable": draw.random() < 0.1,
        "zipped": sometimes(0.06, 2, 3, 4, usual=0),
        "already_sharded": draw.random() < 0.04,
    }
    if is_iterable and data["num_workers"]:
        data["num_workers"] = 1  # more would have to divide the stream among them
    optimizer = draw.choice(["sgd", "sgd", "momentum", "momentum", "adamw", "adamw", "adagrad", "rmsprop", "lbfgs"])
    model = draw.choice(["mlp", "mlp", "mlp", "tied", "frozen", "sparse", "shared", "branches", "scalar"])
    if model == "sparse" and optimizer not in ("sgd", "adagrad"):
        optimizer = "sgd"  # the others of torch refuse sparse gradients
    loss = "items" if data["collate"] == "padded" else draw.choice(["mean", "mean", "items", "two", "inside"])
    of_optimizer: dict[str, Any] = {
        "optimizer": optimizer,
        "groups": sometimes(0.2, 2, usual=1) if optimizer != "lbfgs" else 1,
        "optimizers": sometimes(0.1, 2, usual=1),
        "made": sometimes(0.25, "after", "apart", "first", usual="before"),
        "is_prepared": draw.random() > 0.04,
        "closure": optimizer == "lbfgs" or draw.random() < 0.08,
        "schedule": sometimes(0.35, "step", "lambda", "cosine", usual="none"),
        "clipping": sometimes(0.45, "norm", "norm", "inf", "value", usual="none"),
        "set_to_none": draw.random() > 0.2,
        "clears_first": draw.random() < 0.25,
        "guards": draw.random() < 0.15,
    }
    accumulation = sometimes(0.5, 2, 3, 4, usual=1)
    of_loop: dict[str, Any] = {
        "accumulation": accumulation,
        "accumulates": accumulation > 1 or draw.random() > 0.3,
        "evaluates": sometimes(0.3, "epoch", "middle", usual="no"),
        "breaks": sometimes(0.12, 1, 2, usual=None),
        "skips": draw.random() < 0.08,
        "peeks": draw.random() < 0.1,
        "saves": sometimes(0.12, 1, 2, 3, 5, usual=None),
        "replays": is_iterable and draw.random() < 0.5,
        "unfreezes": 1 if model == "frozen" and draw.random() < 0.3 else None,
    }
    program = Program(
        seed=seed,
        epochs=draw.choice([1, 1, 2, 2, 3]),
        **data,
        model=model,
        output=sometimes(0.5, "tuple", "dict", "model_output", "dataclass", "namedtuple", usual="tensor"),
        loss=loss,
        **of_optimizer,
        **of_loop,
        float32=optimizer in ("sgd", "momentum") and draw.random() < 0.2,  # others divide noise by noise
    )
    return _possible(program)


def _possible(program: Program) -> Program:
    """Take back what makes no program: what plain PyTorch, or the language, does not allow."""
    changes: dict[str, Any] = {}
    if program.model == "sparse":
        # Torch cannot clip, and cannot scale by a norm, gradients that are sparse.
        changes |= {"clipping": "none", "set_to_none": True, "closure": False}
    if program.closure:
        changes |= {"clipping": "none", "clears_first": False, "guards": False}
    if program.optimizer == "lbfgs":
        changes |= {"optimizers": 1, "schedule": "none"}
        if program.loss == "items":
            changes["loss"] = "mean"  # an update without items has no loss that a closure could return
        if program.collate == "padded":
            changes["collate"] = "dict"
    if program.saves is not None:
        changes |= {"breaks": None, "skips": False, "zipped": 0}
        changes["is_prepared"] = True  # the steps of another are neither counted nor saved
        if program.evaluates == "middle":
            changes["evaluates"] = "epoch"  # "after the first update" is another place in a second start
    if program.unfreezes is not None and program.accumulation > 1:
        # A window that goes on from one epoch to the next would have passes of both models; the reference makes them at its end.
        changes |= {"skips": False, "breaks": None}
    if program.zipped:
        # Which loader's end ends a window is nowhere said.
        changes |= {"accumulation": 1, "loss": "mean" if program.loss == "items" else program.loss}
        if program.collate == "padded":
            changes["collate"] = "dict"
    if program.collate == "padded" and (changes.get("loss") or program.loss) != "items":
        changes["collate"] = "dict"  # a mean over positions that only some batches have is another loss
    if program.order == "batch_sampler":
        changes |= {"drop_last": False, "split_batches": False}
    if program.order == "buckets":
        changes |= {"drop_last": False}
    if program.collate == "padded":
        changes["beside"] = "no"
    if program.already_sharded:
        changes |= {"order": "sampler", "data": "map", "split_batches": False, "dispatches": None, "zipped": 0}
    if program.order == "generator" and program.breaks is not None and program.epochs > 1:
        # A prepared loader is one batch ahead, so near the end of the data its generator may have drawn for what comes
        # after (docs/parity.md, "Limitations").
        read = 2 * program.breaks * program.accumulation + 2
        if program.zipped or program.num_samples <= 3 * read * program.batch_size:
            changes["order"] = "shuffle"
    if program.order == "generator" and program.zipped and program.epochs > 1:
        # Likewise: zip() leaves the longer one of both.
        num_batches, num_others = (-(-program.num_samples // size) for size in (program.batch_size, program.zipped))
        if num_others < num_batches <= num_others + 3 * 3:  # up to three processes: a batch of each given, one ahead
            changes["order"] = "shuffle"
    if program.evaluates == "middle" and program.num_workers:
        changes["evaluates"] = "epoch"
    return replace(program, **changes)


_ENGINES = [None, None, "ddp", "zero1", "fsdp2 stage 3", "fsdp2 stage 3", "fsdp2 stage 2"]


def _draw_layouts(draw: random.Random, program: Program, *, level: int) -> dict[str, Any]:
    def one(parity: str) -> Layout:
        world_size = draw.choice([1, 2, 2, 2, 3, 3])
        engine = draw.choice(_ENGINES)
        if world_size == 1 and engine not in (None, "fsdp2 stage 3"):
            engine = None
        return Layout(
            world_size=world_size,
            level=level,
            parity=parity,
            engine=engine,
            max_micro=draw.choice([None, None, 1, 2, 3]) if parity == "exact" else None,
            shards=shards if parity == "bitwise" else None,
        )

    parity = draw.choice(["off", "off", "exact", "exact", "bitwise"])
    shards = draw.choice([3, 4, 8])
    layout = one(parity)
    if parity == "bitwise" or program.saves is not None:
        return {"layout": layout, "other": one(parity)}
    return {"layout": layout}


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases that are ``case`` with one thing less."""
    program, layout = case.program, case.layout
    if case.other is not None and program.saves is None:
        yield replace(case, other=None)
    for field in fields(program):
        if field.name != "seed" and getattr(program, field.name) != field.default:
            changed = replace(program, **{field.name: field.default})
            if layout.level != 2 or _possible(changed) == changed:
                yield replace(case, program=changed)
    if program.epochs > 1:
        yield replace(case, program=replace(program, epochs=1))
    for field in fields(layout):
        if field.name not in ("parity", "world_size", "level") and getattr(layout, field.name) != field.default:
            yield replace(case, layout=replace(layout, **{field.name: field.default}))
    if layout.world_size > 1:
        yield replace(case, layout=replace(layout, world_size=layout.world_size - 1))
