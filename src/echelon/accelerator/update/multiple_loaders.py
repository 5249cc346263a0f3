"""Several training loaders in one loop, in the exact modes: which of them the updates are of.

Read together (``zip``), the first one leads, and the pieces of the others must be the same parts of their batches. Else they
take turns: a loop within a loop, or one batch of each after the other, where each update is one of its own.
"""

from __future__ import annotations

from fractions import Fraction

from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.data.exact.global_batch_slices import Contribution
from echelon.data.loader import PreparedLoader

__all__ = ["UpdateLoaders"]

_Part = tuple[int, int, tuple[Fraction, ...]]
"""The number of a micro-step, how many there are, and which part of its update each rank has in it (one: each the same)."""


class UpdateLoaders:
    """Who leads, of the training loaders that are being read.

    Args:
        are_taken: loaders may take turns.
    """

    def __init__(self, *, are_taken: bool) -> None:
        self._are_taken = are_taken
        self.lead: PreparedLoader | None = None
        """The loader whose batch the micro-step in hand is of."""
        self._outer: list[PreparedLoader] = []  # those whose turn goes on when that of the lead is over
        self._beside: list[tuple[PreparedLoader, Contribution]] = []  # read with the batch in hand
        self._loaders_beside: list[PreparedLoader] = []  # of the pass of the lead
        self._parts_beside: set[_Part] = set()  # likewise
        self._has_ended_beside = False  # has a loader ended that was read with the lead?
        self._unfit: list[
            tuple[PreparedLoader, UsageError]
        ] = []  # gave a batch that is of no update, and are still read
        self._guessed: PreparedLoader | None = (
            None  # gave a batch, and the lead gave one of another cut before any loss
        )
        self._num_given = 0  # by the lead, since its turn began
        self._was_weighed = False  # has a loss been weighed by samples since?
        self._has_loss = False  # has there been any loss since?
        # A loader whose batch is in hand, and what its loss would be wrong by if it were of a batch, too, that was taken since
        # from a loader that is not read any more.
        self._left: tuple[PreparedLoader, UsageError] | None = None
        # Likewise, where that batch has had a loss: it may have been the loss of both, unless the one in hand has its own.
        self._unsure: tuple[PreparedLoader, UsageError] | None = None
        self._is_told = False
        self._is_told_of_left = False

    def num_micro_steps_beside(self, beginning: PreparedLoader | None, *, is_counted: bool) -> int:
        """Return into how many pieces a loader that begins now is to be cut at least: as the one that it is read with."""
        lead = self.lead
        if beginning is None or lead is None or lead is beginning or is_counted or lead.contribution is None:
            return 1
        return lead.contribution.num_micro_steps

    def require_fit(self) -> None:
        """A loss is made: raise where it may be of a batch that belongs to no update. A batch that was only looked at is none."""
        for _, error in self._unfit:
            raise error
        self._has_loss, self._unsure = True, None

    def leads(self, loader: PreparedLoader, contribution: Contribution, *, is_counted: bool, is_within: bool) -> bool:
        """Tell whether the batch that ``loader`` is about to give is one of the updates; else it is one beside another.

        Args:
            loader: it.
            contribution: of the batch.
            is_counted: has the batch in hand had a loss?
            is_within: is its update still to be completed?

        Raises:
            UsageError: it was read together with another one, in pieces that do not correspond.
        """
        lead = self.lead
        if lead is None or lead is loader or lead.contribution is None:
            self.lead, self._beside = loader, []
            self._left = self._unsure = None
            self._num_given += 1
            return True
        own = lead.contribution
        if not is_counted:
            is_first = all(one is not loader for one, _ in self._beside)
            is_aligned = (own.micro_step, own.num_micro_steps) == (
                contribution.micro_step,
                contribution.num_micro_steps,
            )
            is_alike = _part(own) == _part(contribution)
            if is_aligned and is_first and (is_alike or own.num_micro_steps > 1 or not self._are_taken):
                self._beside.append((loader, contribution))
                self._parts_beside.add(_part(contribution))
                if all(one is not loader for one in self._loaders_beside):
                    self._loaders_beside.append(loader)
                return False
            if own.num_micro_steps > 1 or not self._are_taken:
                self._unfit.append((loader, _unlike(own, contribution)))
                return False
            self._take_turn(loader)
            self._guessed = lead
            return True
        if is_within or not self._are_taken:
            error = UsageError(
                "a training loader gives a batch within an update of another one, which has several micro-steps: a loop "
                f"within the loop would be run {own.num_micro_steps} times in each update"
                if is_within
                else "training loaders take turns: with fewer processes a loop within the loop would be run several times in "
                "each update, within an update of another one",
                where="parity='exact' or 'bitwise'",
                do="let an update be one micro-step (parity='exact' without gradient_accumulation_steps and "
                "max_micro_batch_size, more processes instead), read the loaders together (zip), or train one after the other",
            )
            self._unfit.append((loader, error))
            return False
        if self._guessed is loader and self._num_given == 1 and self._was_weighed:
            raise _unlike(contribution, own)
        self._take_turn(loader)
        return True

    def _take_turn(self, loader: PreparedLoader) -> None:
        if self.lead is not None:
            self._outer = [one for one in self._outer if one is not loader and one is not self.lead] + [self.lead]
        self.lead, self._beside, self._guessed = loader, [], None
        self._num_given, self._was_weighed, self._has_loss = 1, False, False
        self._left = self._unsure = None
        self._forget_beside()

    def _forget_beside(self) -> None:
        self._beside, self._loaders_beside = [], []
        self._parts_beside, self._has_ended_beside = set(), False

    def end(self, loader: PreparedLoader, *, is_over: bool) -> PreparedLoader | None:
        """The pass of ``loader`` has ended: return the loader whose turn goes on now, if another's does.

        Args:
            loader: it.
            is_over: it was read to its end, not left.

        Raises:
            UsageError: it was read together with another one, in pieces that do not correspond.
        """
        self._outer = [one for one in self._outer if one is not loader]
        if self.lead is not None:
            self._left = next(((self.lead, error) for one, error in self._unfit if one is loader), self._left)
        self._unfit = [(one, error) for one, error in self._unfit if one is not loader]
        if self._unsure is not None and self._unsure[0] is loader:
            if not is_over:
                warn(f"{self._unsure[1].what} (the last one was)")
            self._unsure = None
        if any(one is loader for one in self._loaders_beside):
            self._has_ended_beside = True
            self._beside = [(one, part) for one, part in self._beside if one is not loader]
        if self._guessed is loader:
            self._guessed = None
            if self._num_given == 1 and self._was_weighed and self.lead is not None:
                assert loader.contribution is not None
                assert self.lead.contribution is not None
                error = _unlike(loader.contribution, self.lead.contribution)
                if is_over:
                    raise error
                warn(f"{error.what} (the last one was)")  # it is being closed, where nobody would see an error
        if self.lead is not loader:
            return None
        self.lead = self._outer.pop() if self._outer else None
        self._forget_beside()
        self._left = self._unsure = None
        if self._guessed is not None and self._guessed is self.lead:
            assert loader.contribution is not None
            assert self.lead.contribution is not None
            error = _unlike(self.lead.contribution, loader.contribution)
            if not self._has_loss:
                self._left = self.lead, error
            elif self._was_weighed and self._num_given == 1 and not is_over:
                self._unsure = self.lead, error
        self._guessed, self._num_given = None, 0
        return self.lead

    def require_alike(self, own: Contribution) -> None:
        """A loss is weighed by the samples of ``own``: raise where it may be one of others, too, that weigh otherwise."""
        self._was_weighed = True
        if self._left is not None and self._left[0] is self.lead and not self._is_told_of_left:
            self._is_told_of_left = True
            warn(
                "a batch of another training loader was taken before this loss, and that loader is not read any more. If the loss "
                f"is of both batches, the update is not that of whole ones: {self._left[1].what}. Read both loaders with zip(); "
                "what is only looked at is better read under torch.no_grad()"
            )
        if not self._parts_beside:
            return
        part = _part(own)
        for _, beside in self._beside:
            if _part(beside) != part:
                raise _unlike(own, beside)
        if self._has_ended_beside and not self._beside and not self._is_told and part not in self._parts_beside:
            self._is_told = True
            warn(
                "a loader that was read together with this one has ended. If its batches are used again (itertools.cycle), they "
                f"are cut as those were, and this one is another part of its batch ({_say(own)}), so the update is not that of "
                "whole batches. Give both loaders drop_last=True, and numbers of samples that divide by their batches"
            )


def _part(of: Contribution) -> _Part:
    num = len(of.update)
    parts = (Fraction(of.num_items, num),) if of.step is None else tuple(Fraction(real, num) for real in of.step.real)
    return of.micro_step, of.num_micro_steps, parts


def _say(of: Contribution) -> str:
    size = f"{of.num_items} of {len(of.update)} samples"
    return size if of.num_micro_steps == 1 else f"{size} in micro-step {of.micro_step + 1} of {of.num_micro_steps}"


def _unlike(own: Contribution, beside: Contribution) -> UsageError:
    return UsageError(
        f"two training loaders are read together, and their pieces do not correspond: {_say(own)} of one, {_say(beside)} of "
        "the other. A loss of both would not be that of whole batches",
        where="parity='exact' or 'bitwise'",
        do="give them batch sizes of which one divides the other, the larger one first in zip(), and drop_last=True; or a loss "
        "with num_items= and updates of one micro-step; or one loader over both (torch.utils.data.StackDataset). A loop within a loop needs "
        "updates of one micro-step",
    )
