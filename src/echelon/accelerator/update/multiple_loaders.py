"""Decides which loader's batches form the updates if a loop reads several training loaders in the exact modes.

If loaders are read in lockstep (``zip``), the first one leads, and each rank must hold the same share of every loader's
batch. Otherwise the loaders take turns (nested loops, or one batch from each loader in turn), and each batch is an
update.
"""

from __future__ import annotations

from fractions import Fraction

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.data.global_batch_slices import Contribution
from echelon.data.loader import PreparedLoader

_Share = tuple[int, int, tuple[Fraction, ...]]
"""Micro-step, number of micro-steps, and each rank's fraction of the update (a single entry if all fractions are
equal)."""


class UpdateLoaders:
    """Tracks which of the training loaders being read forms the updates (the lead).

    Args:
        allows_alternation: whether loops over several loaders may be interleaved.
    """

    def __init__(self, *, allows_alternation: bool) -> None:
        self._allows_alternation = allows_alternation
        self.lead: PreparedLoader | None = None
        """Loader that yielded the current micro-step's batch."""
        self._outer: list[PreparedLoader] = []  # loaders of the enclosing loops
        self._lockstep: list[tuple[PreparedLoader, Contribution]] = []  # read together with the current batch
        self._lockstep_loaders: list[PreparedLoader] = []  # read together with any batch of the lead's pass
        self._lockstep_shares: set[_Share] = set()  # likewise
        self._has_lockstep_ended = False  # a loader read together with the lead has ended
        # Loaders still being read whose batch belongs to no update.
        self._rejected: list[tuple[PreparedLoader, UsageError]] = []
        # The previous lead: the current one yielded a batch of a different share before any loss, and was taken to alternate.
        self._presumed_outer: PreparedLoader | None = None
        self._num_yielded = 0  # batches of the lead since it took over
        self._was_weighted_by_samples = False  # a loss has been, since then
        self._has_loss = False  # since then
        # The lead, and the error to report if its loss also uses a batch of a loader that is no longer being read.
        self._abandoned: tuple[PreparedLoader, UsageError] | None = None
        # The lead, if that batch has already had a loss: the loss covered both batches unless the lead gets its own.
        self._unconfirmed: tuple[PreparedLoader, UsageError] | None = None
        self._warned_of_unequal_ends = False
        self._warned_of_abandoned = False

    def lockstep_micro_steps(self, starting: PreparedLoader | None, *, is_counted: bool) -> int:
        """Return the minimum number of micro-steps for a loader that starts now, set by the loader it is zipped with."""
        lead = self.lead
        if starting is None or lead is None or lead is starting or is_counted or lead.contribution is None:
            return 1
        return lead.contribution.num_micro_steps

    def require_usable_batches(self) -> None:
        """Raise if a loss may depend on a batch that belongs to no update."""
        for _loader, error in self._rejected:
            raise error
        self._has_loss, self._unconfirmed = True, None

    def leads(
        self, loader: PreparedLoader, contribution: Contribution, *, is_counted: bool, is_mid_update: bool
    ) -> bool:
        """Return whether the batch that ``loader`` is about to yield forms updates; otherwise it accompanies another batch.

        Args:
            loader: loader that yields.
            contribution: this rank's share of its batch.
            is_counted: whether the current batch has had a loss.
            is_mid_update: whether the current batch's update is incomplete.

        Raises:
            UsageError: a loader is read in lockstep with another one, but their micro-batches do not match.
        """
        lead = self.lead
        if lead is None or lead is loader or lead.contribution is None:
            self.lead, self._lockstep = loader, []
            self._abandoned = self._unconfirmed = None
            self._num_yielded += 1
            return True
        own = lead.contribution
        if not is_counted:
            is_first = all(one is not loader for one, _ in self._lockstep)
            is_aligned = (own.micro_step, own.num_micro_steps) == (
                contribution.micro_step,
                contribution.num_micro_steps,
            )
            is_equal = _share(own) == _share(contribution)
            if is_aligned and is_first and (is_equal or own.num_micro_steps > 1 or not self._allows_alternation):
                self._lockstep.append((loader, contribution))
                self._lockstep_shares.add(_share(contribution))
                if all(one is not loader for one in self._lockstep_loaders):
                    self._lockstep_loaders.append(loader)
                return False
            if own.num_micro_steps > 1 or not self._allows_alternation:
                self._rejected.append((loader, _mismatch_error(own, contribution)))
                return False
            self._make_lead(loader)
            self._presumed_outer = lead
            return True
        if is_mid_update or not self._allows_alternation:
            error = UsageError(
                "a training loader yielded a batch in the middle of another loader's update, which has "
                f"{own.num_micro_steps} micro-steps; a nested loop would run {own.num_micro_steps} times in each "
                "update"
                if is_mid_update
                else "training loaders are read in turn; with fewer processes, a nested loop would run several times "
                "in each update of the outer loader",
                where="parity='exact' or 'bitwise'",
                do="use one micro-step per update (parity='exact' without gradient_accumulation_steps and "
                "max_micro_batch_size, on more processes), read the loaders together with zip(), or train on one "
                "loader after another",
            )
            self._rejected.append((loader, error))
            return False
        if self._presumed_outer is loader and self._num_yielded == 1 and self._was_weighted_by_samples:
            raise _mismatch_error(contribution, own)
        self._make_lead(loader)
        return True

    def _make_lead(self, loader: PreparedLoader) -> None:
        if self.lead is not None:
            self._outer = [one for one in self._outer if one is not loader and one is not self.lead] + [self.lead]
        self.lead, self._lockstep, self._presumed_outer = loader, [], None
        self._num_yielded, self._was_weighted_by_samples, self._has_loss = 1, False, False
        self._abandoned = self._unconfirmed = None
        self._clear_lockstep()

    def _clear_lockstep(self) -> None:
        self._lockstep, self._lockstep_loaders = [], []
        self._lockstep_shares, self._has_lockstep_ended = set(), False

    def end(self, loader: PreparedLoader, *, is_over: bool) -> PreparedLoader | None:
        """Record the end of a pass over ``loader``; return the other loader that leads next, if any.

        Args:
            loader: loader whose pass ends.
            is_over: whether the loader was exhausted rather than left early.

        Raises:
            UsageError: the loader was read in lockstep with another one, but their micro-batches do not match.
        """
        self._outer = [one for one in self._outer if one is not loader]
        if self.lead is not None:
            self._abandoned = next(
                ((self.lead, error) for one, error in self._rejected if one is loader), self._abandoned
            )
        self._rejected = [(one, error) for one, error in self._rejected if one is not loader]
        if self._unconfirmed is not None and self._unconfirmed[0] is loader:
            if not is_over:
                warn(_("{what} (for the last batches)", what=self._unconfirmed[1].what))
            self._unconfirmed = None
        if any(one is loader for one in self._lockstep_loaders):
            self._has_lockstep_ended = True
            self._lockstep = [(one, share) for one, share in self._lockstep if one is not loader]
        if self._presumed_outer is loader:
            self._presumed_outer = None
            if self._num_yielded == 1 and self._was_weighted_by_samples and self.lead is not None:
                assert loader.contribution is not None
                assert self.lead.contribution is not None
                error = _mismatch_error(loader.contribution, self.lead.contribution)
                if is_over:
                    raise error
                warn(
                    _("{what} (for the last batches)", what=error.what)
                )  # an error raised while an iterator closes would be lost
        if self.lead is not loader:
            return None
        self.lead = self._outer.pop() if self._outer else None
        self._clear_lockstep()
        self._abandoned = self._unconfirmed = None
        if self._presumed_outer is not None and self._presumed_outer is self.lead:
            assert loader.contribution is not None
            assert self.lead.contribution is not None
            error = _mismatch_error(self.lead.contribution, loader.contribution)
            if not self._has_loss:
                self._abandoned = self.lead, error
            elif self._was_weighted_by_samples and self._num_yielded == 1 and not is_over:
                self._unconfirmed = self.lead, error
        self._presumed_outer, self._num_yielded = None, 0
        return self.lead

    def require_matching_shares(self, own: Contribution) -> None:
        """Raise if a loss weighted by the samples in ``own`` may cover other loaders' batches with different weights."""
        self._was_weighted_by_samples = True
        if self._abandoned is not None and self._abandoned[0] is self.lead and not self._warned_of_abandoned:
            self._warned_of_abandoned = True
            warn(
                _(
                    "a batch of another training loader was read before this loss, and that loader is no longer being "
                    "read. If the loss covers both batches, the update is not equivalent to whole batches: {what}. "
                    "Read both loaders with zip(); if you only inspect a batch, read it under torch.no_grad()",
                    what=self._abandoned[1].what,
                )
            )
        if not self._lockstep_shares:
            return
        share = _share(own)
        for _place, other in self._lockstep:
            if _share(other) != share:
                raise _mismatch_error(own, other)
        is_unmatched = not self._lockstep and share not in self._lockstep_shares
        if self._has_lockstep_ended and is_unmatched and not self._warned_of_unequal_ends:
            self._warned_of_unequal_ends = True
            warn(
                _(
                    "a loader that was read together with this one has ended. If its batches are reused "
                    "(itertools.cycle), their shares differ from this batch's ({own}), so the update is not equivalent "
                    "to whole batches. Use drop_last=True for both loaders, and dataset sizes that are multiples of "
                    "the batch sizes",
                    own=_describe(own),
                )
            )


def _share(of: Contribution) -> _Share:
    num = len(of.update)
    shares = (Fraction(of.num_items, num),) if of.step is None else tuple(Fraction(real, num) for real in of.step.real)
    return of.micro_step, of.num_micro_steps, shares


def _describe(of: Contribution) -> str:
    size = f"{of.num_items} of {len(of.update)} samples"
    return size if of.num_micro_steps == 1 else f"{size} in micro-step {of.micro_step + 1} of {of.num_micro_steps}"


def _mismatch_error(own: Contribution, other: Contribution) -> UsageError:
    return UsageError(
        f"two training loaders are read together, but their micro-batches do not match: {_describe(own)} from one, "
        f"{_describe(other)} from the other. A loss over both would not be equivalent to whole batches",
        where="parity='exact' or 'bitwise'",
        do="use batch sizes where one divides the other, with the larger one first in zip(), and drop_last=True; or "
        "pass num_items= with one micro-step per update; or read both datasets with one loader "
        "(torch.utils.data.StackDataset). Nested loops require one micro-step per update",
    )
