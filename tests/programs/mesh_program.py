"""Drawn training programs on device meshes: a small language model, a mesh, a loop; and the plain loop in one process that each must equal."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from echelon import MixtureOfExperts
from tests.parallel_models import IGNORED, VOCABULARY, loss_without_float32, num_tokens, tiny_gpt, tiny_llama
from tests.reference import PlainLoop, Round, batches_of, dealt_batches, permutation

LENGTH, ORDER_SEED, EVALUATED = 16, 41, 7
CLIP = 0.1

Sizes = tuple[tuple[str, int], ...]
"""The sizes of the axes of a ParallelismConfig; empty: one process."""


@dataclass(frozen=True, kw_only=True)
class MeshProgram:
    """One training script and its mesh. Every default is the plainest choice, so that the repr of a program shows what it has."""

    seed: int = 0
    sizes: Sizes = ()
    other: Sizes | None = None
    """The mesh of the second start, after ``saves`` updates."""
    level: int = 2
    parity: str = "exact"
    model: str = "gpt"  # gpt | llama | experts
    num_layers: int = 2
    tied: bool = False
    num_kv_heads: int = 4
    frozen: str = ""  # the beginning of the names of the parameters that are frozen
    unfreezes: bool = False  # after the first epoch
    checkpoints: bool = False  # activations
    splits_sequences: bool = False  # of tp: SequenceParallel and loss parallel
    exchange: str = "alltoall"  # of cp
    schedule_of_stages: str = "1F1B"
    num_micro_batches: int = 2
    epochs: int = 2
    num_samples: int = 16
    batch_size: int = 8
    """Of an update under ``exact``, of a reader under ``off``."""
    drop_last: bool = False
    shuffle: bool = False
    ragged: bool = False  # batches of other lengths
    packed: bool = False  # several documents in a sequence
    loss: str = "items"  # items | mean | inside (the model's own)
    optimizer: str = "sgd"  # sgd | momentum | adamw
    schedule: str = "none"  # none | step | cosine
    clipping: str = "none"  # none | norm | inf | value
    accumulation: int = 1
    max_micro: int | None = None
    evaluates: bool = False
    saves: int | None = None

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"MeshProgram({', '.join(shown)})"

    def on(self, sizes: Sizes) -> MeshProgram:
        """Return the program on another mesh."""
        return replace(self, sizes=sizes)

    @property
    def world_size(self) -> int:
        """The number of processes. Experts are divided among the ranks of other axes."""
        return math.prod(size for axis, size in self.sizes if axis != "ep_size")

    @property
    def num_readers(self) -> int:
        """The number of ranks that read different samples."""
        return math.prod(size for axis, size in self.sizes if axis in ("dp_replicate_size", "dp_shard_size"))

    def size(self, axis: str) -> int:
        """Return the size of an axis, such as ``tp``."""
        return dict(self.sizes).get(f"{axis}_size", 1)


@dataclass
class Found:
    """What a run has; lists have an entry for each update."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    evaluations: list[torch.Tensor] = field(default_factory=list)
    """For each evaluation the loss of each sample (level 2), or the mean loss (level 3)."""
    has_saved: bool = False


def sizes_of(text: str) -> Sizes:
    """``shard 2 tp 2`` -> the sizes of the axes."""
    names = {"shard": "dp_shard_size", "replicate": "dp_replicate_size"}
    words = text.split()
    return tuple((names.get(axis, f"{axis}_size"), int(size)) for axis, size in zip(words[::2], words[1::2]))


_MESHES = [
    "tp 2", "tp 4", "replicate 2 tp 2", "shard 2 tp 2", "shard 2 tp 2", "shard 2", "replicate 2 shard 2",
    "cp 2", "cp 4", "shard 2 cp 2", "replicate 2 cp 2", "cp 2 tp 2", "sp 2", "sp 4", "shard 2 sp 2", "sp 2 tp 2",
    "pp 2", "pp 2", "pp 4", "pp 2 shard 2", "pp 2 replicate 2", "pp 2 tp 2", "pp 2 cp 2", "pp 2 sp 2",
]  # fmt: skip
_EIGHT = ["replicate 2 shard 2 tp 2", "shard 2 cp 2 tp 2", "pp 2 shard 2 tp 2", "pp 2 cp 2 tp 2", "shard 2 sp 2 tp 2"]
_OF_EXPERTS = [
    "shard 2 ep 2",
    "shard 4 ep 2",
    "shard 4 ep 4",
    "replicate 2 shard 2 ep 2",
    "shard 2 cp 2 ep 2",
    "shard 2",
    "",
]
_STAGES = [
    "GPipe",
    "1F1B",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


def draw_mesh_program(seed: int, *, largest: int = 4) -> MeshProgram:
    """Return the program of ``seed`` on at most ``largest`` processes."""
    draw = random.Random(f"mesh {seed}")

    def sometimes(share: float, *values: Any, usual: Any) -> Any:
        return draw.choice(values) if draw.random() < share else usual

    has_experts = draw.random() < 0.12
    meshes = _OF_EXPERTS if has_experts else [*_MESHES, *(_EIGHT if largest >= 8 else [])]
    meshes = [text for text in meshes if MeshProgram(sizes=sizes_of(text)).world_size <= largest]
    sizes = sizes_of(draw.choice(meshes))
    is_staged = "pp_size" in dict(sizes)
    model = "experts" if has_experts else "llama" if is_staged else draw.choice(["gpt", "llama", "llama"])
    stages = draw.choice(_STAGES)
    level = 3 if model == "llama" and draw.random() < 0.25 else 2
    saves = sometimes(0.25, 1, 2, 3, usual=None)
    others = [text for text in [*meshes, ""] if not ("pp" in text and model != "llama")]
    loss = draw.choice(["items", "items", "items", "mean", "inside"])
    program = MeshProgram(
        seed=seed,
        sizes=sizes,
        other=None if saves is None else sizes_of(draw.choice(others)),
        level=level,
        parity="off" if draw.random() < 0.2 else "exact",
        model=model,
        num_layers=4 if is_staged or saves is not None or draw.random() < 0.2 else 2,
        tied=not has_experts and draw.random() < 0.35,
        num_kv_heads=sometimes(0.4, 2, 2, 1, usual=4) if model == "llama" else 4,
        frozen=sometimes(0.2, "embedding", "block", "head", "norm", usual=""),
        unfreezes=draw.random() < 0.3,
        checkpoints=draw.random() < 0.2,
        splits_sequences=draw.random() < 0.4,
        exchange=draw.choice(["alltoall", "allgather"]),
        schedule_of_stages=stages,
        num_micro_batches=draw.choice([4, 4, 6, 8]) if stages not in ("GPipe", "1F1B") else draw.choice([2, 3, 4]),
        epochs=draw.choice([1, 2, 2]),
        num_samples=draw.choice([5, 9, 12, 14, 16, 19]),
        batch_size=draw.choice([2, 4, 5, 6, 8]),
        drop_last=draw.random() < 0.2,
        shuffle=draw.random() < 0.5,
        ragged=draw.random() < 0.3,
        packed=draw.random() < 0.2,
        loss=loss,
        optimizer=draw.choice(["sgd", "momentum", "adamw"]),
        schedule=sometimes(0.35, "step", "cosine", usual="none"),
        clipping=sometimes(0.55, "norm", "norm", "inf", "value", usual="none"),
        accumulation=sometimes(0.4, 2, 3, usual=1),
        max_micro=sometimes(0.2, 1, 2, 3, usual=None),
        evaluates=draw.random() < 0.4,
        saves=saves,
    )
    return _possible(program)


def _possible(program: MeshProgram) -> MeshProgram:
    """Take back what makes no program."""
    changes: dict[str, Any] = {}
    if program.model != "llama":
        changes |= {"level": 2, "packed": False, "loss": "items" if program.loss == "inside" else program.loss}
    if program.model == "experts":
        changes |= {"optimizer": "sgd", "tied": False}  # AdamW turns rounding into steps, and with them the routing
    if program.tied and program.frozen == "head":
        changes["frozen"] = "embedding"  # one weight
    if not program.frozen:
        changes["unfreezes"] = False
    is_split = program.model == "gpt" and program.size("tp") > 1 and program.size("cp") * program.size("sp") == 1
    if not (is_split and program.other is None):
        changes["splits_sequences"] = False
    elif program.splits_sequences:
        changes |= {"ragged": False, "frozen": "", "evaluates": False}  # of evaluations, logits stay split
    if changes.get("loss", program.loss) == "mean":
        changes |= {"ragged": False}
    is_deep = any(dict(sizes or ()).get("pp_size", 1) > 2 for sizes in (program.sizes, program.other))
    if is_deep and program.schedule_of_stages not in ("GPipe", "1F1B"):
        changes["num_layers"] = 8
    if program.parity == "off":
        changes["max_micro"] = None
    if program.level == 3:
        changes |= {"loss": "inside", "clipping": "norm" if program.clipping != "none" else "none", "unfreezes": False}
        changes["drop_last"] = (
            program.drop_last and not program.evaluates
        )  # dataloader_drop_last is for evaluations, too
    return replace(program, **changes)


def simpler(program: MeshProgram) -> Iterator[MeshProgram]:
    """Yield programs with one thing less."""
    for one in fields(program):
        if one.name not in ("seed", "sizes", "other") and getattr(program, one.name) != one.default:
            changed = replace(program, **{one.name: one.default})
            if one.name == "saves":
                changed = replace(changed, other=None)
            if _possible(changed) == changed:
                yield changed
    if program.epochs > 1:
        yield replace(program, epochs=1)
    for axis in program.sizes:
        yield replace(program, sizes=tuple(one for one in program.sizes if one != axis))


# ---- the parts in plain PyTorch --------------------------------------------------------------------------------------


_FROZEN = {
    "embedding": ("embedding", "position", "model.embed_tokens"),
    "block": ("blocks.0.", "model.layers.0."),
    "head": ("head", "lm_head"),
    "norm": ("norm", "model.norm"),
}


def build(program: MeshProgram, *, seed: int = 0) -> Any:
    """Return the model, the same in every process; another ``seed``: with other weights."""
    if program.model == "llama":
        model: Any = tiny_llama(
            num_layers=program.num_layers, num_kv_heads=program.num_kv_heads, tied=program.tied, attention="sdpa"
        )
        model.loss_function = loss_without_float32
        if program.checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model = tiny_gpt(num_layers=program.num_layers, tied=program.tied)
        model.checkpoints = program.checkpoints
        if program.model == "experts":
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(13)
                for block in model.blocks:
                    block.mlp = MixtureOfExperts(16, 24, num_experts=8, top_k=2).double()
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + seed)
    if program.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(_FROZEN[program.frozen]))
    return model


def make_rows(program: MeshProgram, *, evaluation: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return the samples; labels are those of the next token, -100 where they do not count."""
    generator = torch.Generator().manual_seed(program.seed + (500 if evaluation else 0))
    rows = []
    for index in range(EVALUATED if evaluation else program.num_samples):
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        end = LENGTH if program.loss == "mean" else int(torch.randint(1, LENGTH + 1, (), generator=generator))
        labels = torch.where(torch.arange(LENGTH) < end, tokens[1:], IGNORED)
        if program.loss == "inside" or program.level == 3:  # models shift labels themselves
            labels = torch.where(torch.arange(LENGTH) < end, tokens[:-1], IGNORED)
        row = {"input_ids": tokens[:-1], "labels": labels}
        if program.level == 2:
            row["index"] = torch.tensor(index)
        if program.packed:
            first = int(torch.randint(3, LENGTH - 3, (), generator=generator))
            row["position_ids"] = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        rows.append(row)
    return rows


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows, and cut the half that none of them needs."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if bool((batch["labels"][:, LENGTH // 2 :] == IGNORED).all()):
        return {name: value[:, : LENGTH // 2] if value.dim() > 1 else value for name, value in batch.items()}
    return batch


def make_loader(program: MeshProgram, rows: list[Any], *, evaluation: bool = False) -> DataLoader[Any]:
    """Return the loader of ``rows``."""
    collates: dict[str, Any] = {"collate_fn": collate} if program.ragged else {}
    if evaluation:
        return DataLoader(rows, batch_size=3, **collates)
    return DataLoader(
        rows, batch_size=program.batch_size, shuffle=program.shuffle, drop_last=program.drop_last, **collates
    )


def make_optimizer(program: MeshProgram, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters."""
    if program.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, eps=1e-6)
    momentum = 0.9 if program.optimizer == "momentum" else 0.0
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.01)


def make_schedule(program: MeshProgram, optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule of the learning rate; None: none."""
    if program.schedule == "none":
        return None
    if program.schedule == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def next_labels(program: MeshProgram, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return for each position the label of the next token."""
    if program.loss == "inside" or program.level == 3:
        return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return batch["labels"]


def mean_loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean over the labels that count; 0 without any."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / max(1, num_tokens(labels))


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum over the labels of each row."""
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none").sum(1)


def logits_of(program: MeshProgram, model: Any, batch: dict[str, torch.Tensor], positions: Any = None) -> torch.Tensor:
    """Return the logits of a batch."""
    if program.model != "llama":
        out: torch.Tensor = model(batch["input_ids"], positions)
        return out
    more = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    return model(input_ids=batch["input_ids"], **more).logits  # type: ignore[no-any-return]


# ---- the plain loop --------------------------------------------------------------------------------------------------


def run_plainly(program: MeshProgram) -> Found:
    """Run the program in one process."""
    rows, evaluated = make_rows(program), make_rows(program, evaluation=True)
    model = build(program)
    optimizer = make_optimizer(program, model)
    schedule = make_schedule(program, optimizer)
    whole = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def losses(piece: list[int]) -> Iterator[tuple[torch.Tensor, float | None]]:
        if piece:
            batch = {name: value[piece] for name, value in whole.items()}
            labels = next_labels(program, batch)
            loss = mean_loss_of(logits_of(program, model, batch), labels)
            yield loss, None if program.loss == "mean" else float(num_tokens(labels))

    is_off = program.parity == "off"
    loop = PlainLoop(
        model,
        losses,
        [optimizer],
        schedules=[] if schedule is None else [schedule],
        schedule_steps=program.num_readers if is_off and program.level == 2 else 1,
        clip=_clip_of(program),
    )
    found = Found()
    for epoch in range(program.epochs):
        if program.unfreezes and epoch == 1:
            model.requires_grad_(True)
        rounds = _rounds(program, epoch)
        size = program.accumulation if is_off else 1
        for start in range(0, len(rounds), size):
            loop.update(rounds[start : start + size])
        if program.evaluates:
            batch = {name: torch.stack([row[name] for row in evaluated]) for name in evaluated[0]}
            labels = next_labels(program, batch)
            with torch.no_grad():
                logits = logits_of(program, model, batch)
                mean = mean_loss_of(logits, labels)
                found.evaluations.append(mean[None] if program.level == 3 else sample_losses(logits, labels))
    found.weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    found.losses, found.norms, found.rates = loop.found_losses, loop.found_norms, loop.found_rates
    return found


def _rounds(program: MeshProgram, epoch: int) -> list[Round]:
    is_off = program.parity == "off"
    order = list(range(program.num_samples))
    if program.shuffle:
        order = permutation(program.num_samples, seed=program.seed + ORDER_SEED, epoch=epoch)
    batches = batches_of(order, program.batch_size, drop_last=program.drop_last)
    if not is_off:
        return [[batch] for batch in batches]
    if program.num_readers == 1:
        return [[batch] for batch in batches]
    return dealt_batches(
        batches,
        world_size=program.num_readers,
        batch_size=program.batch_size,
        even=True,
        drop_last=program.drop_last,
    )


def _clip_of(program: MeshProgram) -> Any:
    if program.clipping == "value":
        return lambda parameters: nn.utils.clip_grad_value_(parameters, CLIP / 10)
    if program.clipping == "none":
        return None
    kind = math.inf if program.clipping == "inf" else 2.0
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, CLIP, kind)
