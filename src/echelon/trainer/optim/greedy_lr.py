"""GreedyLR: raises the learning rate while the metric improves, and lowers it otherwise."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, SupportsFloat

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

_IS_BETTER = (
    "_is_better" if hasattr(ReduceLROnPlateau, "_is_better") else "is_better"
)  # named is_better in torch 2.7 and 2.8


class GreedyLR(ReduceLROnPlateau):
    """Divides the learning rate by ``factor`` after more than ``patience`` improvements in a row, and multiplies it by
    ``factor`` after as many evaluations in a row without improvement.

    Derives from ``ReduceLROnPlateau``, so that code that passes a metric to its ``step`` also works with this class.

    Source: GreedyLR, arXiv 2512.14527; names and defaults match transformers' class.

    Args:
        optimizer: the optimizer whose learning rates change. mode, factor, patience, threshold, threshold_mode,
        cooldown, min_lr, eps: the same as in ``ReduceLROnPlateau``.
        warmup: number of values to ignore after an increase, as ``cooldown`` does after a decrease.
        max_lr: maximum learning rate, for all groups or per group.
        smooth: compare the mean of the last ``window_size`` values.
        window_size: see ``smooth``.
        reset_start: reset the learning rates and counters after this many decreases at the minimum learning rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: Literal["rel", "abs"] = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | list[float] = 1e-3,
        max_lr: float | list[float] = 1.0,
        eps: float = 1e-8,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        self.warmup = warmup
        self.smooth = smooth
        self.window_size = window_size
        self.reset_start = self.reset_start_original = reset_start
        super().__init__(optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps)
        num_groups = len(optimizer.param_groups)
        self.max_lrs = list(max_lr) if isinstance(max_lr, (list, tuple)) else [max_lr] * num_groups
        if len(self.max_lrs) != num_groups:
            raise ValueError(f"expected {num_groups} max_lrs, got {len(self.max_lrs)}")
        self._init_lrs = [float(group["lr"]) for group in optimizer.param_groups]

    def _reset(self) -> None:
        super()._reset()
        self.num_good_epochs = 0
        self.warmup_counter = 0
        self.reset_start = self.reset_start_original
        self._window: deque[float] = deque(maxlen=self.window_size)

    def step(self, metrics: SupportsFloat, epoch: int | None = None) -> None:  # type: ignore[override]
        """Update the learning rate with an evaluation's metric."""
        current = float(metrics)
        if self.smooth:
            self._window.append(current)
            current = sum(self._window) / len(self._window)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter or self.warmup_counter:
            if self.cooldown_counter:
                self.cooldown_counter -= 1
            else:
                self.warmup_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        elif getattr(self, _IS_BETTER)(current, self.best):
            self.best = current
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            self._raise_lr()
            self.warmup_counter, self.num_good_epochs = self.warmup, 0
        elif self.num_bad_epochs > self.patience:
            self._reduce_lr(self.last_epoch)
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _raise_lr(self) -> None:
        for group, max_lr in zip(self.optimizer.param_groups, self.max_lrs):
            higher = min(group["lr"] / self.factor, max_lr)
            if higher - group["lr"] > self.eps:
                group["lr"] = higher
        self.reset_start = self.reset_start_original

    def _reduce_lr(self, epoch: int) -> None:
        super()._reduce_lr(epoch)
        groups = self.optimizer.param_groups
        if any(group["lr"] > least for group, least in zip(groups, self.min_lrs)):
            return
        self.reset_start -= 1
        if self.reset_start <= 0:
            for group, rate in zip(groups, self._init_lrs):
                group["lr"] = rate
            self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the same names as in transformers."""
        state = {name: value for name, value in vars(self).items() if name not in ("optimizer", "_window")}
        if self.smooth:
            values = list(self._window)
            state["_streaming_avg"] = {"window_size": self.window_size, "values": values, "sum": sum(values)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by this class or by transformers' class."""
        window = (state_dict.get("_streaming_avg") or {}).get("values", [])
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "_streaming_avg"})
        self._window = deque(window, maxlen=self.window_size)
        for group, rate in zip(self.optimizer.param_groups, self._last_lr):
            group["lr"] = rate
