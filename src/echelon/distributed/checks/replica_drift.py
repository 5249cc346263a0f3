"""Detects when parameters that should be equal on all ranks drift apart.

The check uses no collectives, because ranks may step different numbers of times. Before some optimizer steps, each rank
writes fingerprints of its parameters to the process group's store, and the last rank to do so compares them.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import DesyncError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import UserLine, user_line, warn_here
from echelon.distributed.stores import exchange_once, is_first, store_of

_Named = list[tuple[str, torch.Tensor]]
_Fingerprints = np.ndarray[tuple[int], np.dtype[np.int64]]

_FEW_OPTIMIZERS = 3
_MAX_OPTIMIZERS = 16  # a program may create one for each batch
_MANY_STEPS = 16
_NUM_SHOWN = 3
_LAST_S = 5.0
_POLL_S = 0.005
_IS_READ = "is_read"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaDriftCheck:
    """Compares each optimizer's parameters before steps 1, 2, 3, 5, 9, 17, ..., and whenever the caller requests it.

    Sharded parameters (DTensor and other subclasses) are not compared.
    """

    def __init__(self, *, is_error: bool = False) -> None:
        self._is_error = is_error
        group = dist.group.WORLD
        self._prefix = ""
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        if group is not None and dist.get_world_size() > 1:
            with suppress(dist.DistNetworkError):  # rank 0, which serves the store, has exited
                number = store_of(group).add(f"echelon/replica_drift/num_checks/{dist.get_rank()}", 1)
                self._prefix = f"echelon/replica_drift/{number}"  # the ranks create their checks in the same order
                self._group = weakref.ref(group)
        self._histories: WeakKeyDictionary[Optimizer, _History] = WeakKeyDictionary()
        self._num_optimizers: Counter[str] = Counter()
        self._num_comparisons = 0
        self._postponed: dict[str, _Report] = {}
        weakref.finalize(self, _warn_of_few, self._postponed, self._num_optimizers)  # also at exit

    def before_step(
        self, optimizer: Optimizer, do: str, *, models: Sequence[nn.Module] | None = None, must_be_equal: bool = True
    ) -> None:
        """Compare the parameters and the settings of ``optimizer`` before steps 1, 2, 3, 5, 9, 17, and so on.

        Args:
            models: modules whose parameters are compared (default: the optimizer's parameters).
            must_be_equal: if False, parameters that differ before the first step are assumed to differ on purpose. Other
                differences are reported at step 17, or at the end of the run unless the program has created many optimizers
                (as in per-rank inner loops).

        Raises:
            DesyncError: ``is_error`` and ``must_be_equal`` are True, and the ranks differ.
        """
        if not self._is_open():
            return
        kind = "model" if must_be_equal else "own"
        history = self._histories.get(optimizer)
        if history is None:
            index = self._num_optimizers[kind]
            history = self._histories[optimizer] = _History(index, is_ignored=index >= _MAX_OPTIMIZERS)
            self._num_optimizers[kind] += 1
        num = history.num_steps
        history.num_steps += 1
        if history.is_ignored or num & (num - 1):
            return
        when = f"after {num} step{'s' * (num > 1)} of {type(optimizer).__name__}" if num else "before the first step"
        values = _parameters_of(optimizer) if models is None else _named(models)
        subject = f"{kind}_{history.index}"
        found = self._find_drift(f"{subject}/{num}", [*values, *_settings_of(optimizer)], subject)
        if found and must_be_equal:
            self._report(f"{found} {when}", do)
        elif found and num:
            self._postponed[subject] = _Report(f"{found} {when}", do, user_line())
        if num >= _MANY_STEPS and subject in self._postponed:
            self._postponed.pop(subject).warn()

    def ignore(self, optimizer: Optimizer) -> None:
        """Stop comparing the parameters of ``optimizer``, because a difference is expected or was already reported."""
        history = self._histories.setdefault(optimizer, _History(-1))
        self._postponed.pop(f"own_{history.index}", None)
        history.is_ignored = True

    def compare_models(self, models: Sequence[nn.Module], when: str, do: str, *, is_last: bool = False) -> None:
        """Compare the parameters of ``models`` at a point that every rank reaches.

        Args:
            when: when the comparison happens, as worded in the message.
            do: what the user can do about a difference.
            is_last: whether the process group closes next. Rank 0, which serves the store, then waits up to 5 s for the others.

        Raises:
            DesyncError: ``is_error`` is True and the parameters differ.
        """
        if not self._is_open() or not models:
            return
        self._num_comparisons += 1
        what = f"models/{self._num_comparisons}"
        found = self._find_drift(what, _named(models), f"models/{when}")
        if is_last and dist.get_rank() == 0:
            self._wait_for_comparison(what)
        if found:
            self._report(f"{found} {when}", do)

    def stop(self) -> None:
        """Stop comparing, and report postponed differences."""
        self._group = None
        _warn_of_few(self._postponed, self._num_optimizers)

    def _is_open(self) -> bool:
        """Return whether the group that was open when this object was created is still open."""
        return self._group is not None and self._group() is not None and self._group() is dist.group.WORLD

    def _find_drift(self, what: str, named: _Named, subject: str) -> str | None:
        """Write fingerprints to the store; the last rank to do so returns what differs, once per ``subject``."""
        named = [(name, p) for name, p in named if _is_replicated(p)]
        if not named:
            return None
        parameters = [p for _, p in named]
        mine = np.concatenate((_layout(parameters), _fingerprints(parameters)))
        store = self._store(what)
        try:
            theirs = exchange_once(store, mine.tobytes(), rank=dist.get_rank(), world_size=dist.get_world_size())
        except dist.DistNetworkError:  # rank 0, which serves the store, has exited: the run is ending
            self.stop()
            return None
        if theirs is None:
            return None
        found = _find_difference([np.frombuffer(text, dtype=np.int64) for text in theirs])
        is_reported = found is None or not is_first(self._store(subject))
        with suppress(dist.DistNetworkError):  # rank 0 has exited since then
            store.set(_IS_READ, "1")  # only now may rank 0 exit
        if found is None or is_reported:
            return None
        rank, differing = found
        names = [named[i][0] for i in differing]
        more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        return f"rank 0 and rank {rank} have different values for {', '.join(names[:_NUM_SHOWN])}{more}"

    def _wait_for_comparison(self, what: str) -> None:
        store, end = self._store(what), time.monotonic() + _LAST_S
        # Another rank may never come, and this one does not report that. So it does not use `wait`, whose timeout prints two of torch's
        # warnings between the traceback of the rank that failed and the launcher's report.
        with suppress(dist.DistError, RuntimeError):
            while not store.check([_IS_READ]) and time.monotonic() < end:
                time.sleep(_POLL_S)

    def _store(self, prefix: str) -> dist.Store:
        return dist.PrefixStore(f"{self._prefix}/{prefix}", store_of())

    def _report(self, message: str, do: str) -> None:
        line = user_line()
        if self._is_error:
            raise DesyncError(message, where=str(line), do=do)
        _Report(message, do, line).warn()


@dataclass(frozen=True, slots=True)
class _Report:
    """A difference between ranks that is reported now or later."""

    message: str
    do: str
    line: UserLine

    def warn(self) -> None:
        # Only the last rank has compared the values, so it warns whatever its number.
        warn_here(
            _("{message}, so they train different models. To fix it: {do}", message=self.message, do=self.do),
            at=self.line,
        )


def _warn_of_few(postponed: dict[str, _Report], num_optimizers: Counter[str]) -> None:
    """Warn about the ``postponed`` differences, unless the program has created many optimizers."""
    if num_optimizers["own"] <= _FEW_OPTIMIZERS:
        for report in postponed.values():
            report.warn()
    postponed.clear()


@dataclass(slots=True)
class _History:
    """How often an optimizer has stepped, and whether it is compared."""

    index: int
    """Number of optimizers of the same kind that took their first step before this one."""
    num_steps: int = 0
    is_ignored: bool = False


def _named(models: Sequence[nn.Module]) -> _Named:
    return [item for model in models for item in model.named_parameters()]


def _parameters_of(optimizer: Optimizer) -> _Named:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [(f"parameter {i} of shape {list(p.shape)}", p) for i, p in enumerate(parameters)]


def _settings_of(optimizer: Optimizer) -> _Named:
    """Return the numeric settings in the parameter groups of ``optimizer``, such as learning rates."""
    return [
        (f"{name} of parameter group {i}", torch.tensor(float(value), dtype=torch.float64))
        for i, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    ]


def _is_replicated(parameter: torch.Tensor) -> bool:
    is_plain = type(parameter) in (torch.Tensor, nn.Parameter) and parameter.layout is torch.strided
    return is_plain and not parameter.is_meta and not parameter.is_quantized


def _layout(parameters: Sequence[torch.Tensor]) -> _Fingerprints:
    text = " ".join(f"{p.dtype} {list(p.shape)}" for p in parameters)
    return np.array([xxhash.xxh3_64_intdigest(text.encode()) >> 1], dtype=np.int64)


def _fingerprints(parameters: Sequence[torch.Tensor]) -> _Fingerprints:
    """Return the 64-bit integer sum of each parameter's bit patterns, which is exact in any order of summation."""
    sums: list[torch.Tensor] = []
    for parameter in parameters:
        plain = parameter.detach()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        sums.append(plain.view(_INTEGERS[plain.element_size()]).sum(dtype=torch.int64))
    devices = {value.device for value in sums}
    found = np.zeros(len(sums), dtype=np.int64)
    for device in devices:  # one transfer for each device
        indices = [i for i, value in enumerate(sums) if value.device == device]
        found[indices] = torch.stack([sums[i] for i in indices]).cpu().numpy()
    return found


def _find_difference(ranks: Sequence[_Fingerprints]) -> tuple[int, list[int]] | None:
    """Return a rank that differs from rank 0 and the differing indices, or None if all are equal or not comparable."""
    first = ranks[0]
    if any(len(theirs) != len(first) or theirs[0] != first[0] for theirs in ranks):
        return None
    for rank, theirs in enumerate(ranks):
        differing = np.flatnonzero(theirs[1:] != first[1:])
        if len(differing):
            return rank, differing.tolist()
    return None
