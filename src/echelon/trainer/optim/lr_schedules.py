"""Learning rate schedulers by name; each multiplies the peak rate by a function of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from echelon.base.errors import ConfigError
from echelon.trainer.arguments.enums import SchedulerType, choose
from echelon.trainer.optim.greedy_lr import GreedyLR


def get_scheduler(
    name: str | SchedulerType,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler:
    """Return the scheduler called ``name`` for ``optimizer``; call its ``step`` once per optimizer step.

    Args:
        name: see ``SchedulerType``.
        optimizer: its learning rates are the peak rates.
        num_warmup_steps: number of warm-up steps (default: 0).
        num_training_steps: total number of steps, including warm-up; constant schedulers do not need it.
        scheduler_specific_kwargs: extra arguments for the scheduler.

    Raises:
        ConfigError: a name or argument is unknown, or ``num_training_steps`` is missing.

    Examples:
        >>> scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=100)
    """
    kind = choose(SchedulerType, name, setting="lr_scheduler_type")
    more = dict(scheduler_specific_kwargs or {})
    if kind is SchedulerType.REDUCE_ON_PLATEAU:
        return ReduceLROnPlateau(optimizer, **more)
    if kind is SchedulerType.GREEDY:
        return GreedyLR(optimizer, **more)
    if num_training_steps is None and kind in _NEED_NUM_STEPS:
        raise ConfigError(
            f"the {kind.value!r} scheduler needs num_training_steps",
            where="get_scheduler",
            do="pass num_training_steps",
        )
    if kind in _WITH_MIN_LR:
        more["min_lr_rate"] = _min_lr_rate(kind, more, peak=float(optimizer.defaults["lr"]))
    if kind is SchedulerType.POLYNOMIAL:
        more = _with_end(more, peak=float(optimizer.defaults["lr"]))
    factor = partial(
        _FACTORS[kind], num_warmup_steps=num_warmup_steps or 0, num_training_steps=num_training_steps or 0, **more
    )
    try:
        factor(0)
    except TypeError as error:
        raise ConfigError(
            f"the {kind.value!r} scheduler does not accept these arguments: {error}",
            where="lr_scheduler_kwargs",
            do="see the functions of echelon.trainer.optim.lr_schedules",
        ) from error
    return LambdaLR(optimizer, factor)


def _constant(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return 1.0


def _constant_with_warmup(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return step / max(1, num_warmup_steps) if step < num_warmup_steps else 1.0


def _linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def _cosine(step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    return max(0.0, _half_wave(2.0 * num_cycles * _progress(step, num_warmup_steps, num_training_steps)))


def _cosine_with_restarts(step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: int = 1) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    progress = _progress(step, num_warmup_steps, num_training_steps)
    return 0.0 if progress >= 1.0 else max(0.0, _half_wave((num_cycles * progress) % 1.0))


def _polynomial(
    step: int, *, num_warmup_steps: int, num_training_steps: int, lr_init: float, lr_end: float, power: float = 1.0
) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    end_rate = lr_end / lr_init
    if step > num_training_steps:
        return end_rate
    remaining = 1 - (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    return (1 - end_rate) * math.pow(remaining, power) + end_rate


def _inverse_sqrt(step: int, *, num_warmup_steps: int, num_training_steps: int, timescale: int | None = None) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    scale = timescale or num_warmup_steps or 10_000
    return 1.0 / math.sqrt((step + scale - num_warmup_steps) / scale)


def _cosine_with_min_lr(
    step: int, *, num_warmup_steps: int, num_training_steps: int, min_lr_rate: float, num_cycles: float = 0.5
) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    wave = _half_wave(2.0 * num_cycles * _progress(step, num_warmup_steps, num_training_steps))
    return max(0.0, wave * (1 - min_lr_rate) + min_lr_rate)


def _cosine_warmup_with_min_lr(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_rate: float,
    num_cycles: float = 0.5,
    warmup_lr_rate: float | None = None,
) -> float:
    # As in transformers, this scheduler counts steps from 1.
    if step < num_warmup_steps:
        if warmup_lr_rate is None:
            return (step + 1) / max(1, num_warmup_steps)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, num_warmup_steps - 1)
    wave = _half_wave(2.0 * num_cycles * (step - num_warmup_steps + 1) / max(1, num_training_steps - num_warmup_steps))
    return max(0.0, wave * (1 - min_lr_rate) + min_lr_rate)


def _warmup_stable_decay(
    step: int,
    *,
    num_warmup_steps: int,
    num_training_steps: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    stable = num_training_steps - num_warmup_steps - num_decay_steps if num_stable_steps is None else num_stable_steps
    if step < num_warmup_steps:
        rise = _shape(warmup_type, 1 - step / max(1, num_warmup_steps), num_cycles=0.5, setting="warmup_type")
        return max(0.0, rise * (1.0 - min_lr_ratio) + min_lr_ratio)
    if step < num_warmup_steps + stable:
        return 1.0
    if step < num_warmup_steps + stable + num_decay_steps:
        part = (step - num_warmup_steps - stable) / max(1, num_decay_steps)
        fall = _shape(decay_type, part, num_cycles=num_cycles, setting="decay_type")
        return max(0.0, fall * (1.0 - min_lr_ratio) + min_lr_ratio)
    return min_lr_ratio


def _shape(kind: str, part: float, *, num_cycles: float, setting: str) -> float:
    """Return the factor after fraction ``part`` of a decay from 1 to 0."""
    if kind == "linear":
        return 1.0 - part
    if kind == "cosine":
        return _half_wave(2.0 * num_cycles * part)
    if kind == "1-sqrt":
        return 1.0 - math.sqrt(part)
    raise ConfigError(f"{setting}={kind!r} is not one of linear, cosine, 1-sqrt", where="lr_scheduler_kwargs")


def _half_wave(turns: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * turns))


def _progress(step: int, num_warmup_steps: int, num_training_steps: int) -> float:
    return (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)


def _min_lr_rate(kind: SchedulerType, more: dict[str, Any], *, peak: float) -> float:
    rate, lr = more.pop("min_lr_rate", None), more.pop("min_lr", None)
    if (rate is None) == (lr is None):
        raise ConfigError(
            f"the {kind.value!r} scheduler needs either min_lr (a learning rate) or min_lr_rate (a fraction of the "
            "peak)",
            where="lr_scheduler_kwargs",
            do="set one of them, for example lr_scheduler_kwargs={'min_lr_rate': 0.1}",
        )
    return float(rate) if rate is not None else float(lr) / peak


def _with_end(given: Mapping[str, Any], *, peak: float) -> dict[str, Any]:
    """Return the polynomial scheduler's arguments in ``given``, and its first and last learning rates."""
    lr_end = given.get("lr_end", 1e-7)
    if "lr_init" in given:
        raise ConfigError(
            "the polynomial scheduler has no argument lr_init, because it starts at the optimizer's learning rate",
            where="lr_scheduler_kwargs",
            do="remove lr_init and set learning_rate",
        )
    if not peak > lr_end:
        raise ConfigError(
            f"the polynomial scheduler's lr_end={lr_end} is not below the learning rate {peak}",
            where="lr_scheduler_kwargs",
            do="set a smaller lr_end",
        )
    return {"lr_end": lr_end, **given, "lr_init": peak}


_FACTORS: Mapping[SchedulerType, Callable[..., float]] = {
    SchedulerType.LINEAR: _linear,
    SchedulerType.COSINE: _cosine,
    SchedulerType.COSINE_WITH_RESTARTS: _cosine_with_restarts,
    SchedulerType.POLYNOMIAL: _polynomial,
    SchedulerType.CONSTANT: _constant,
    SchedulerType.CONSTANT_WITH_WARMUP: _constant_with_warmup,
    SchedulerType.INVERSE_SQRT: _inverse_sqrt,
    SchedulerType.COSINE_WITH_MIN_LR: _cosine_with_min_lr,
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: _cosine_warmup_with_min_lr,
    SchedulerType.WARMUP_STABLE_DECAY: _warmup_stable_decay,
}
_WITH_MIN_LR = frozenset({SchedulerType.COSINE_WITH_MIN_LR, SchedulerType.COSINE_WARMUP_WITH_MIN_LR})
_NEED_NUM_STEPS = frozenset(_FACTORS) - {
    SchedulerType.CONSTANT,
    SchedulerType.CONSTANT_WITH_WARMUP,
    SchedulerType.INVERSE_SQRT,
}
