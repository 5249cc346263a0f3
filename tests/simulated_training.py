"""Data-parallel training in one process, written out by hand, which writes the trace that a recorder would write.

It is a model of W ranks: sharded samples, micro-steps, ragged items, reduction, clipping, a schedule, SGD or AdamW, normalization over
the global batch, buffers, an averaged model, sharded or replicated tensors. ``fault`` plants one mistake in it. Nothing of echelon is
used but the format of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from echelon.distributed.checks.sketch import Sketch, sketches_of
from echelon.verify.trace import (
    Batch,
    Clip,
    Content,
    Event,
    Forward,
    Loss,
    Model,
    OptimizerStep,
    RecordingSettings,
    Rng,
    Row,
    SketchedTensors,
    Trace,
)

NAMES = [
    "embedding.weight",
    "norm.weight",
    "first.weight",
    "first.bias",
    "second.weight",
    "unused.weight",
    "third.bias",
]
LINE = "train.py:12"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One simulated run."""

    world_size: int = 2
    batch_size: int = 4
    """Samples of one rank in one micro-step."""
    num_micro_steps: int = 2
    num_updates: int = 4
    first_update: int = 0
    num_samples: int = 64
    dtype: torch.dtype = torch.float32
    is_ragged: bool = False
    is_sharded: bool = False
    max_norm: float | None = 1.0
    optimizer: str = "adamw"
    lr: float = 0.01
    schedule: bool = True
    width: int = 12
    seed: int = 0
    activation: str = "tanh"
    fault: str = ""
    at: int = 1
    """First update that has the fault."""
    local_gradients: bool = True
    perturbation: int = 0
    """Seed of changes of the weights by one rounding, and of the gradients; opposite for an odd seed and the next even one."""
    gradient_errors: tuple[tuple[str, float], ...] = ()
    """By how much gradients are changed, as a part of their norms."""

    def has(self, name: str, update: int) -> bool:
        return self.fault == name and update >= self.at


@dataclass(slots=True)
class Rank:
    """State of one rank."""

    weights: dict[str, torch.Tensor]
    states: dict[str, dict[str, torch.Tensor]]
    buffers: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor]
    old: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients that the previous step used."""
    steps: int = 0


def reference_of(setting: Setting, **changes: object) -> Setting:
    """Return the same training on one process, which takes all samples of a micro-step."""
    merged = {"world_size": 1, "batch_size": setting.batch_size * setting.world_size, "fault": "", "is_sharded": False}
    return replace(setting, **{**merged, "first_update": 0, **changes})  # type: ignore[arg-type]


class Simulation:
    """One run; ``trace()`` makes all its updates."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.events: list[list[Event]] = [[] for _ in range(setting.world_size)]
        generator = torch.Generator().manual_seed(setting.seed)
        self.inputs = torch.randint(0, 16, (setting.num_samples, 6), generator=generator)
        self.targets = torch.randn(setting.num_samples, setting.width, generator=generator)
        self.items = (
            torch.randint(1, 12, (setting.num_samples,), generator=generator)
            if setting.is_ragged
            else torch.ones(setting.num_samples)
        )
        self.noise = torch.Generator().manual_seed((setting.perturbation + 1) // 2)
        self.ranks = [self._initial() for _ in range(setting.world_size)]

    # state ---------------------------------------------------------------------------------------------------------------------

    def _initial(self) -> Rank:
        s = self.setting
        generator = torch.Generator().manual_seed(s.seed + (8 if s.fault == "different initial weights" else 1))
        w = s.width
        shapes = {"embedding.weight": (16, w), "norm.weight": (w,), "first.weight": (2 * w, w), "first.bias": (2 * w,)}
        shapes |= {"second.weight": (w, 2 * w), "unused.weight": (w, w), "third.bias": (1,)}
        weights = {}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 1.0)
            weights[name] = value.to(torch.bfloat16 if s.dtype is torch.bfloat16 else torch.float32).to(s.dtype)
            if s.perturbation:
                weights[name] = weights[name] * (1 + torch.finfo(s.dtype).eps * self._signs(weights[name]))
        states = {
            name: {"exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.zeros_like(one)}
            for name, one in weights.items()
        }
        buffers = {
            "norm.running_mean": torch.zeros(w, dtype=s.dtype),
            "norm.num_batches_tracked": torch.zeros((), dtype=torch.int64),
        }
        return Rank(weights, states, buffers, {name: one.clone() for name, one in weights.items()})

    def _signs(self, value: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, value.shape, generator=self.noise).to(value.dtype) * 2 - 1
        return signs if self.setting.perturbation % 2 else -signs

    # data ----------------------------------------------------------------------------------------------------------------------

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * self.setting.seed + epoch)
        return torch.randperm(self.setting.num_samples, generator=generator).tolist()

    def samples(self, update: int, micro_step: int, rank: int) -> list[int]:
        s = self.setting
        size = s.batch_size * s.world_size
        place = (update * s.num_micro_steps + micro_step) * size
        if s.has("shifted by a micro-batch", update):
            place += s.batch_size
        if s.has("sharded twice", update):
            place = ((update * s.num_micro_steps + micro_step) * s.world_size) * size
        epoch, place = divmod(place, s.num_samples)
        order = self.order(epoch)
        whole = (order[place:] + self.order(epoch + 1))[
            : size * (s.world_size if s.has("sharded twice", update) else 1)
        ]
        own = whole[rank :: s.world_size]
        if s.has("sharded twice", update):
            own = own[:: s.world_size]
        if s.has("same samples", update):
            own = whole[: s.batch_size]
        if s.has("left out", update) and rank == s.world_size - 1:
            own = own[:-1]
        return own

    def row(self, sample: int) -> Row:
        shift = 1 << 40 if self.setting.fault == "augmented" else 0
        return Row(whole=sample * 2654435761 + 1 + shift, prefix=sample * 2654435761 + 7 + shift)

    # one update ----------------------------------------------------------------------------------------------------------------

    def trace(self) -> Trace:
        s = self.setting
        for rank, events in enumerate(self.events):
            events.append(
                RecordingSettings(
                    steps=s.num_updates,
                    is_float64=s.dtype is torch.float64,
                    first_update=s.first_update,
                )
            )
            for index in range(2):
                events.append(
                    Model(
                        model=index,
                        parameters=NAMES,
                        dtypes=[str(s.dtype)] * len(NAMES),
                        tied={"head.weight": "embedding.weight"} if index == 0 else {},
                        buffers=list(self.ranks[rank].buffers) if index == 0 else [],
                        module_classes={
                            "norm": "SyncBatchNorm",
                            "first": "Linear",
                            "drop": "Dropout",
                        },
                    )
                )
        ends = s.first_update + s.num_updates - (1 if s.fault == "ends early" else 0)
        if s.first_update == 0:
            self._close(-1)
        for update in range(ends):
            self._update(update)
            if update < s.first_update - 1:
                for events in self.events:
                    del events[3:]
            if update == s.first_update - 1:
                self._resume(update)
        return Trace(ranks=self.events)

    def _update(self, update: int) -> None:
        s = self.setting
        local: list[dict[str, torch.Tensor]] = [{} for _ in self.ranks]
        last: list[dict[str, torch.Tensor]] = [{} for _ in self.ranks]
        steps = s.num_micro_steps
        chosen = [[self.samples(update, m, rank) for m in range(steps)] for rank in range(s.world_size)]
        total = sum(float(self.items[one].sum()) for rows in chosen for one in rows)
        for micro_step in range(steps):
            statistics = self._statistics([rows[micro_step] for rows in chosen])
            for rank, state in enumerate(self.ranks):
                rows = chosen[rank][micro_step]
                gradients = self._backward(update, micro_step, rank, rows, statistics, total, steps)
                for name, value in gradients.items():
                    local[rank][name] = local[rank][name] + value if name in local[rank] else value
                last[rank] = gradients
                if not s.has("stale buffers", update):
                    mean = state.buffers["norm.running_mean"]
                    state.buffers["norm.running_mean"] = 0.9 * mean + 0.1 * statistics[0].to(s.dtype)
                state.buffers["norm.num_batches_tracked"] = state.buffers["norm.num_batches_tracked"] + 1
        reduced = self._reduced(update, local, last)
        self._gradient_events("reduced", update, steps, reduced)
        if s.max_norm is not None:
            self._clip(update, reduced, steps)
            self._gradient_events("clipped", update, steps, reduced)
        for rank, gradients in enumerate(reduced):
            self._step(update, rank, gradients)
        self._close(update)

    def _statistics(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._embedded([one for own in rows for one in own], self.ranks[0].weights)
        # Like SyncBatchNorm, but without gradients through the statistics.
        return hidden.mean(0).detach(), hidden.var(0, unbiased=False).detach()

    def _embedded(self, rows: list[int], weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return weights["embedding.weight"][self.inputs[rows]].sum(1)

    def _backward(
        self,
        update: int,
        micro_step: int,
        rank: int,
        rows: list[int],
        statistics: tuple[torch.Tensor, torch.Tensor],
        total: float,
        steps: int,
    ) -> dict[str, torch.Tensor]:
        s, events, state = self.setting, self.events[rank], self.ranks[rank]
        self._data_events(update, micro_step, rank, rows)
        weights = {name: one.detach().requires_grad_() for name, one in state.weights.items()}
        mean, variance = statistics
        normed = (self._embedded(rows, weights) - mean) / (variance + 0.1).sqrt() * weights["norm.weight"]
        first = normed @ weights["first.weight"].T + weights["first.bias"]
        if s.has("one wrong row", update) and rank == s.world_size - 1:
            first = first + torch.tensor([[0.02]] + [[0.0]] * (len(rows) - 1), dtype=s.dtype)
        active = {"tanh": torch.tanh, "relu": torch.relu}[s.activation](first)
        if s.has("evaluation mode", update):
            active = active * 1.1
        out = active @ weights["second.weight"].T + weights["third.bias"]
        if not s.has("unused on a rank", update) or rank == 0:
            out = out + normed @ weights["unused.weight"]
        logits = out @ weights["embedding.weight"].T
        for module, value in (("norm", normed), ("first", first), ("", logits)):
            self._forward_event(update, micro_step, rank, module, value)
        labels = (self.targets[rows].abs().sum(1) * 100).long() % 16
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        items = self.items[rows].to(s.dtype)
        mean_loss = (losses * items).sum() / items.sum()
        loss = mean_loss * float(items.sum()) / total * s.world_size * steps
        if s.has("averaged per rank", update):
            loss = mean_loss
        loss = loss / steps * (steps if s.has("not divided", update) else 1)
        events.append(
            Loss(
                update=update,
                micro_step=micro_step,
                value=float(loss.detach()),
                weight=float(items.sum()) if s.is_ragged else None,
                line=LINE,
            )
        )
        loss.backward()
        gradients = {name: one.grad.detach().clone() for name, one in weights.items() if one.grad is not None}
        if s.has("backward scaled", update):
            gradients = {name: 1.5 * one for name, one in gradients.items()}
        if s.has("wrong backward on a rank", update) and rank == s.world_size - 1:
            gradients["first.weight"] = gradients["first.weight"] + 0.1 * gradients["first.weight"].flip(0)
        if s.local_gradients:
            events.append(self._gradients("local", update, micro_step, gradients, rank))
        return gradients

    def _data_events(self, update: int, micro_step: int, rank: int, rows: list[int]) -> None:
        s = self.setting
        events = self.events[rank]
        items = int(self.items[rows].sum()) if s.is_ragged else None
        identities = [self.row(one) for one in rows]
        events.append(
            Batch(update=update, micro_step=micro_step, source="loader", rows=identities, num_items=items, line=LINE)
        )
        # One number is drawn in each update, after its first forward pass.
        state = 1_000_000 * (rank + 1) + 1000 * (update + (micro_step > 0))
        if s.has("equal generators", update):
            state -= 1_000_000 * rank
        events.append(Rng(update=update, micro_step=micro_step, torch=state, draws_masks=True))

    def _forward_event(self, update: int, micro_step: int, rank: int, module: str, value: torch.Tensor) -> None:
        size = value.shape[1]
        basis = torch.randn(size, 4, generator=torch.Generator().manual_seed(size), dtype=torch.float64) / 2
        rows = (value.detach().to(torch.float64) @ basis).numpy()
        self.events[rank].append(
            Forward(
                update=update,
                micro_step=micro_step,
                model=0,
                module=module,
                shape=list(value.shape),
                rows=rows,
            )
        )

    def _reduced(
        self, update: int, local: list[dict[str, torch.Tensor]], last: list[dict[str, torch.Tensor]]
    ) -> list[dict[str, torch.Tensor]]:
        s, size = self.setting, self.setting.world_size
        mean: dict[str, torch.Tensor] = {}
        for name in NAMES:
            values = [one[name] for one in local if name in one]
            if not values:
                continue
            if s.has("reduced in bfloat16", update):
                values = [one.to(torch.bfloat16).to(s.dtype) for one in values]
            mean[name] = torch.stack(values).sum(0) / size
            if s.has("reduced in bfloat16", update):
                mean[name] = mean[name].to(torch.bfloat16).to(s.dtype)
        mean = {name: one * (size if s.has("summed", update) else 1.0) for name, one in mean.items()}
        result = [dict(mean) for _ in self.ranks]
        for rank, gradients in enumerate(result):
            if s.has("not reduced", update):
                gradients.update(local[rank])
            if s.has("only the last reduced", update):
                for name in gradients:
                    average = torch.stack([one[name] for one in last]).sum(0) / size
                    gradients[name] = local[rank][name] - last[rank][name] + average
            if s.has("changed on all ranks", update):
                gradients["first.weight"] = gradients["first.weight"] * (1 + 1e-4)
            if s.has("missing gradient", update):
                gradients["first.bias"] = torch.zeros_like(gradients["first.bias"])
        return result

    def _clip(self, update: int, gradients: list[dict[str, torch.Tensor]], steps: int) -> None:
        s = self.setting
        assert s.max_norm is not None
        for rank, one in enumerate(gradients):
            squares = [self._parts(value, rank) for value in one.values()]
            norm = (
                float(torch.stack([square.square().sum() for square in squares]).sum().sqrt())
                if s.has("norm of a shard", update)
                else float(torch.stack([value.norm() for value in one.values()]).norm())
            )
            factor = min(1.0, s.max_norm / (norm + 1e-6))
            for name in one:
                one[name] = one[name] * factor
            self.events[rank].append(Clip(update=update, micro_step=steps, norm=norm, max_norm=s.max_norm, line=LINE))

    def _parts(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        flat = value.reshape(-1)
        size = -(-flat.numel() // self.setting.world_size)
        return flat[rank * size : (rank + 1) * size]

    def rate(self, update: int) -> float:
        s = self.setting
        step = update * (s.world_size if s.has("scheduler steps W times", update) else 1)
        return s.lr / (1 + 0.1 * step) if s.schedule else s.lr

    def _step(self, update: int, rank: int, gradients: dict[str, torch.Tensor]) -> None:
        s, state = self.setting, self.ranks[rank]
        lr, decay = self.rate(update), 0.01
        skipped = s.has("skipped on a rank", update) and rank == s.world_size - 1
        groups = {f"0:{name}": 0 for name in NAMES}
        settings = [{"weight_decay": decay, "betas": [0.9, 0.999], "momentum": 0.9}]
        self.events[rank].append(
            OptimizerStep(
                update=update,
                lrs=[lr],
                settings=settings,
                group_of=groups,
                is_skipped=skipped,
                line=LINE,
            )
        )
        errors = dict(s.gradient_errors) if s.perturbation else {}
        gradients = {
            name: one + self._signs(one) * errors.get(f"0:{name}", 0.0) * one.norm() / one.numel() ** 0.5
            for name, one in gradients.items()
        }
        old, state.old = state.old, dict(gradients)
        if s.has("old gradients", update) and old:
            gradients = old
        if not skipped:
            state.steps += s.world_size if s.has("steps counted W times", update) else 1
            for name, gradient in gradients.items():
                self._step_tensor(state, name, gradient, lr, 0.1 if s.has("silent decay", update) else decay)
        if s.has("swapped states", update):
            a, b = state.states["first.weight"], state.states["second.weight"]
            a["exp_avg"], b["exp_avg"] = (
                b["exp_avg"].reshape(a["exp_avg"].shape),
                a["exp_avg"].reshape(b["exp_avg"].shape),
            )
        if s.has("drift", update) and rank == 1:
            state.weights["first.weight"] = state.weights["first.weight"] * (1 + 2.0**-20)
        self._average(state)

    def _step_tensor(self, state: Rank, name: str, gradient: torch.Tensor, lr: float, decay: float) -> None:
        weight, own = state.weights[name], state.states[name]
        if self.setting.optimizer == "sgd":
            own["exp_avg"] = 0.9 * own["exp_avg"] + gradient + decay * weight
            state.weights[name] = weight - lr * own["exp_avg"]
            return
        own["exp_avg"] = 0.9 * own["exp_avg"] + 0.1 * gradient
        own["exp_avg_sq"] = 0.999 * own["exp_avg_sq"] + 0.001 * gradient * gradient
        first, second = 1 - 0.9**state.steps, 1 - 0.999**state.steps
        state.weights[name] = weight * (1 - lr * decay) - lr * (own["exp_avg"] / first) / (
            (own["exp_avg_sq"] / second).sqrt() + 1e-8
        )

    def _average(self, state: Rank) -> None:
        for name, one in state.weights.items():
            state.average[name] = 0.9 * state.average[name] + 0.1 * one

    # events --------------------------------------------------------------------------------------------------------------------

    def _sketches(self, values: list[torch.Tensor], rank: int, is_sharded: bool) -> list[Sketch]:
        if not is_sharded:
            return sketches_of(values)
        sizes = [-(-value.numel() // self.setting.world_size) for value in values]
        offsets = [min(rank * size, value.numel()) for size, value in zip(sizes, values, strict=True)]
        return sketches_of([self._parts(value, rank) for value in values], offsets)

    def _tensors(
        self, content: Content, update: int, rank: int, values: dict[str, torch.Tensor], **facts: Any
    ) -> SketchedTensors:
        """Return the event of ``values`` by name."""
        is_sharded = self.setting.is_sharded and content not in ("local", "buffers")
        sketches = self._sketches(list(values.values()), rank, is_sharded)
        return SketchedTensors(
            content=content, update=update, names=list(values), sketches=sketches, is_sharded=is_sharded, **facts
        )

    def _gradients(
        self, content: Content, update: int, micro_step: int, gradients: dict[str, torch.Tensor], rank: int
    ) -> SketchedTensors:
        named = {f"0:{name}": gradients[name] for name in NAMES if name in gradients}
        return self._tensors(content, update, rank, named, micro_step=micro_step)

    def _gradient_events(
        self, content: Content, update: int, steps: int, gradients: list[dict[str, torch.Tensor]]
    ) -> None:
        for rank, one in enumerate(gradients):
            self.events[rank].append(self._gradients(content, update, steps - 1, one, rank))

    def _close(self, update: int) -> None:
        s = self.setting
        for rank, state in enumerate(self.ranks):
            both = enumerate((state.weights, state.average))
            weights = {f"{model}:{name}": one[name] for model, one in both for name in NAMES}
            buffers = {f"0:{name}": one for name, one in state.buffers.items()}
            states = {f"0:{name}/{kind}": one for name in NAMES for kind, one in state.states[name].items()}
            self.events[rank] += [
                self._tensors("weights", update, rank, weights),
                self._tensors("buffers", update, rank, buffers),
                self._tensors("optimizer_state", update, rank, states),
            ]
            if s.fault in ("saved too early", "shard not saved") and update == s.at:
                saved = {f"0:{name}": one for name, one in state.weights.items()}
                if s.fault == "saved too early":
                    saved = {name: one * 1.01 for name, one in saved.items()}
                else:
                    saved = dict(list(saved.items())[:-2])
                self.events[rank].append(self._tensors("saved", update, rank, saved, path="last"))

    def _resume(self, update: int) -> None:
        """Drop what was recorded so far, as a new process does, and spoil the state that it begins with."""
        s = self.setting
        for rank, state in enumerate(self.ranks):
            del self.events[rank][3:]
            fresh = self._initial()
            if s.fault == "weights not restored":
                state.weights = fresh.weights
            if s.fault == "buffers not restored":
                state.buffers = fresh.buffers
            if s.fault == "older state":
                state.weights = dict(self._older[rank])
        self._close(update)

    @property
    def _older(self) -> list[dict[str, torch.Tensor]]:
        shorter = Simulation(replace(self.setting, fault="", first_update=0, num_updates=self.setting.first_update - 1))
        shorter.trace()
        return [one.weights for one in shorter.ranks]


def simulate(setting: Setting) -> Trace:
    """Return the trace of ``setting``."""
    return Simulation(setting).trace()
