"""Which samples each update used, and why a layout used others than the reference."""

from __future__ import annotations

from collections import Counter

from echelon.verify.comparison.alignment import AlignedRun, SampleIds
from echelon.verify.comparison.cause_catalogue import LikelyCause, likely_cause


class SampleComparison:
    """The samples of both runs by update."""

    def __init__(self, layout: AlignedRun, reference: AlignedRun, samples: SampleIds) -> None:
        for run in (layout, reference):
            for update in run.updates:
                for one in run.ranks_at(update):
                    samples.add(one.rows())
        self._world_size = layout.world_size
        self._resumed_at = layout.resumed_at or layout.first_update or None
        self._by_rank = {
            update: [[samples.of(row) for row in one.rows()] for one in layout.ranks_at(update)]
            for update in layout.updates
        }
        self._ours = {update: [one for rows in ranks for one in rows] for update, ranks in self._by_rank.items()}
        self._theirs = {
            update: [samples.of(row) for one in reference.ranks_at(update) for row in one.rows()]
            for update in reference.updates
        }
        self._micro_steps = {
            update: [len(one.micro_steps()) for one in layout.ranks_at(update)] for update in layout.updates
        }
        # Under these parities the samples that fill up a global batch have no weight.
        self._fills_up = any(one.parity in ("exact", "bitwise") for one in layout.models.values())
        self._their_micro_steps = {update: len(reference.at(0, update).micro_steps()) for update in reference.updates}

    def is_recorded(self, update: int) -> bool:
        """Return whether both runs recorded the samples of ``update``."""
        return bool(self._ours.get(update)) and bool(self._theirs.get(update))

    def count(self, update: int) -> int:
        """Return the number of samples that the reference used in ``update``."""
        return len(self._theirs.get(update, []))

    def ours(self, update: int) -> list[int]:
        """Return the samples that the layout used in ``update``, by rank."""
        return self._ours[update]

    def differs(self, update: int) -> bool:
        """Return whether the layout used different samples than the reference in ``update``; their order does not matter."""
        if not self.is_recorded(update):
            return False
        ours, theirs = Counter(self._ours[update]), Counter(self._theirs[update])
        extra = ours - theirs
        num_filling = (self._world_size - 1) * max(self._micro_steps[update]) if self._fills_up else 0
        return bool(theirs - ours) or extra.total() > num_filling or not extra.keys() <= theirs.keys()

    def same_samples(self, update: int, rank: int, other: int) -> bool:
        """Return whether two ranks used the same samples, as ranks do that hold parts of one model."""
        ranks = self._by_rank[update]
        return Counter(ranks[rank]) == Counter(ranks[other])

    def summary(self, update: int) -> str:
        """Return what differs, in words."""
        ours, theirs = Counter(self._ours[update]), Counter(self._theirs[update])
        missing, extra = (theirs - ours).total(), (ours - theirs).total()
        parts = [f"{missing} of the {theirs.total()} samples of the reference run are missing"] if missing else []
        if extra:
            repeated = sum(1 for one in (ours - theirs) if one in theirs)
            parts.append(
                f"{extra} other samples are used instead"
                if not repeated
                else f"{extra} samples are used once too often"
            )
        return " and ".join(parts) or "the samples differ"

    def cause(self, update: int) -> LikelyCause:
        """Return the likely cause of a difference in ``update``."""
        order = (self._repeated_order, self._shifted)
        if self._resumed_at is not None and update >= self._resumed_at:
            order = (
                self._shifted,
                self._repeated_order,
            )  # a wrong position is likelier than a sampler without set_epoch
        for check in (self._same_on_all_ranks, *order, self._sharded_twice, self._by_count):
            cause = check(update)
            if cause is not None:
                return cause
        return self._other_order(update)

    def _same_on_all_ranks(self, update: int) -> LikelyCause | None:
        ranks = [rank for rank in range(1, self._world_size) if self.same_samples(update, 0, rank)]
        if not ranks or len(ranks) < self._world_size - 1:
            return None
        return likely_cause(
            "same samples on every rank",
            why=f"all {self._world_size} ranks read the same {len(self._by_rank[update][0])} samples in update {update}",
        )

    def _repeated_order(self, update: int) -> LikelyCause | None:
        ours, theirs = Counter(self._ours[update]), Counter(self._theirs[update])
        for earlier in range(min(self._ours), update):
            if Counter(self._ours[earlier]) == ours and Counter(self._theirs.get(earlier, [])) != theirs:
                return likely_cause(
                    "same order in each epoch",
                    why=f"update {update} has the samples of update {earlier} again, but not in the reference run, which shuffles anew",
                )
        return None

    def _shifted(self, update: int) -> LikelyCause | None:
        ours = Counter(self._ours[update])
        for other, theirs in self._theirs.items():
            if other != update and Counter(theirs) == ours:
                distance = abs(other - update)
                word = "later" if other > update else "earlier"
                return likely_cause(
                    "shifted by whole updates",
                    why=f"update {update} has the samples that the reference run has in update {other}, {distance} update(s) {word}",
                )
        places = self._places()
        known = sorted(places[one] for one in ours if one in places)
        begins = sum(len(self._theirs[one]) for one in sorted(self._theirs) if one < update)
        if len(known) == len(self._ours[update]) and known[-1] - known[0] == len(known) - 1 and known[0] != begins:
            return likely_cause(
                "shifted by samples",
                why=f"update {update} has the samples that the reference run reads {abs(known[0] - begins)} samples "
                + ("later" if known[0] > begins else "earlier"),
            )
        return None

    def _sharded_twice(self, update: int) -> LikelyCause | None:
        size, first = self._world_size, min(self._theirs)
        begin = first + (update - first) * size
        several = {one for later in range(begin, begin + size) for one in self._theirs.get(later, [])}
        ours = set(self._ours[update])
        if (
            size > 1
            and begin + size - 1 <= max(self._theirs)
            and len(ours) == len(self._ours[update])
            and ours <= several
        ):
            return likely_cause(
                "sharded twice",
                why=f"each rank reads only one in {size} samples of its own shard: update {update} has samples of {size} updates of the reference run",
            )
        return None

    def _by_count(self, update: int) -> LikelyCause | None:
        ours, theirs = Counter(self._ours[update]), Counter(self._theirs[update])
        extra, missing = ours - theirs, theirs - ours
        seen = {one for earlier in self._ours if earlier < update for one in self._ours[earlier]}
        micro_steps, theirs_steps = self._micro_steps[update], self._their_micro_steps[update]
        if (missing or extra) and any(one != theirs_steps for one in micro_steps):
            return likely_cause(
                "different accumulation window",
                why=f"update {update} has {_span(micro_steps)} micro-steps (backward passes) on a rank, and {theirs_steps} in the reference run",
            )
        if extra and not missing and all(one in seen or one in theirs for one in extra):
            return likely_cause(
                "padded with repeated samples",
                why=f"{extra.total()} samples are repeated to give every rank the same number, and count twice in the gradient",
            )
        if missing and not extra:
            return likely_cause(
                "samples left out",
                why=f"no rank reads {missing.total()} samples that the reference run has in update {update}",
            )
        owners: dict[int, set[int]] = {}
        for rank, rows in enumerate(self._by_rank[update]):
            for one in rows:
                owners.setdefault(one, set()).add(rank)
        shared = sum(1 for one, ranks in owners.items() if len(ranks) > 1 and theirs[one] < 2)
        if shared:
            return likely_cause("ranks overlap", why=f"several ranks read the same {shared} samples in update {update}")
        return None

    def _other_order(self, update: int) -> LikelyCause:
        known = {one for rows in self._theirs.values() for one in rows}
        unknown = sum(1 for one in self._ours[update] if one not in known)
        if unknown == len(self._ours[update]) and update == min(self._ours):
            return likely_cause(
                "different contents",
                why=f"no sample of update {update} occurs in the reference run: the contents of the samples differ, not only their order",
            )
        return likely_cause(
            "different order",
            why=f"the samples of update {update} are those of the dataset, but in a different order than in the reference run",
        )

    def _places(self) -> dict[int, int]:
        """Return the position of each sample in the reference's order; samples that occur twice have none."""
        order = [one for update in sorted(self._theirs) for one in self._theirs[update]]
        counts = Counter(order)
        return {one: place for place, one in enumerate(order) if counts[one] == 1}


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
