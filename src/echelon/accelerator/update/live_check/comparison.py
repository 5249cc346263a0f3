"""Compares what the ranks observed of one update with each other, and with the update of one process."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from echelon.accelerator.update.live_check.observation import LossWeight, Observation
from echelon.distributed.alone import is_alone
from echelon.distributed.checks.finding import Finding, Stage
from echelon.distributed.checks.sketch import NUM_BUCKETS
from echelon.distributed.small_messages import gather_bytes, host_wire

_NUM_ROWS = 64
_MIN_ROWS = 8
_MOSTLY_DISTINCT = 0.9
_MOSTLY_COMMON = 0.5
_KINDS = ("weights", "gradient", "after")
_ORDER: tuple[Stage, ...] = (
    "data", "rng", "buffers", "loss weight", "reduce", "clip", "scheduler", "optimizer", "weights",
)  # fmt: skip
"""Stages in which an update is compared, in the order in which they are reported: one follows from the other."""
_FALSE_ALARMS = 1e-6
"""Expected number of false alarms in a run, however long it is."""
_NUM_SHOWN = 3
_LOCAL_ROUNDINGS = 5
"""Roundings of a gradient's element besides the additions: cast, division by the number of ranks, cast back, factor, unscaling."""


class UpdateComparison:
    """One comparison. Every rank finds the same findings.

    Args:
        observation: the update on this rank.
        number: of the check in this run, from 1.
        rank: this rank.
        world_size: number of ranks.
        averages: whether gradients are averaged across ranks, not summed.
        carried_rows: hashes of samples of an earlier update, whose suspected duplicates were too few to be sure.
    """

    def __init__(
        self,
        observation: Observation,
        *,
        number: int,
        rank: int,
        world_size: int,
        averages: bool,
        carried_rows: Sequence[np.ndarray[Any, np.dtype[np.uint64]]] = (),
    ) -> None:
        self._own = observation
        self._ledger = observation.ledger
        self._rank = rank
        self._world_size = world_size
        self._averages = averages
        self._names = [one.name for one in self._ledger.watched]
        self._factor = allowed_factor(len(self._names) * (NUM_BUCKETS + 2), number=number)
        self._rows = [*carried_rows, *observation.rows]
        self._found: list[Finding] = []
        self._ranks: list[dict[str, Any]] = []
        """Facts of all ranks, by rank."""
        self.is_over = False
        """Whether any rank has stepped: otherwise, the update continues with another loss."""
        self.suspects_duplicates = False
        """Whether the next update should be checked, too, because this one has too few samples to be sure."""
        self.compared: set[str] = set()
        """Stages for which there was something to compare."""
        self.has_equal_masks = False
        """Whether ranks draw the same dropout masks."""

    def run(self, *, is_exact: bool) -> list[Finding]:
        """Return what differs, the first stage first. Collective: call on every rank."""
        self._ranks = [json.loads(theirs) for theirs in gather_bytes(json.dumps(self._facts()).encode())]
        self.is_over = any(self._all("num_steps"))
        if not self.is_over or any(self._all("is_abandoned")) or not self._is_equal("layout"):
            return []
        self.compared.add("optimizer")
        if self._world_size > 1:
            self.compared |= {"weights", "scheduler"}
            self._compare_samples()
            self._compare_generators(is_exact=is_exact)
            self._compare_buffers()
        self._compare_sums(self._sum_over_ranks(self._sums()))
        if self._world_size > 1 and self._compare_steps():
            self._compare_hashes("weights", "weights")
            self._compare_changes()
            self._compare_hashes("gradient", "reduce")
            self._compare_settings()
            self._compare_hashes("after", "optimizer")
        return sorted(self._agree(), key=lambda one: (_ORDER.index(one.stage), -(one.difference or 0.0)))

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        """Return what this rank tells the others; of long values, a hash."""
        own, watched = self._own, self._ledger.watched
        facts: dict[str, Any] = {"num_steps": own.num_steps, "is_abandoned": own.is_abandoned, "layout": 0}
        if self._world_size == 1:
            return facts
        given = [] if own.has_padding else self._rows
        rows = np.unique(np.concatenate(given)) if given else np.empty(0, dtype=np.uint64)
        ratios = self._ledger.ratios[self._ledger.changed]
        facts |= {
            "layout": _digest([(one.name, one.num_elements) for one in watched]),
            "shard": next((one.shard for one in watched if one.is_sharded), 0),
            "steps": self._steps(),
            "settings": _digest(self._settings()),
            "buffers": _digest(own.forward.buffers),
            "generator": own.forward.generator,
            "draws_masks": own.draws_masks and own.forward.has_masks and not own.has_padding,
            "num_changed": int(self._ledger.changed.sum()),
            "ratio": float(ratios.median()) if len(ratios) and not bool(ratios.isnan().any()) else None,
            "num_rows": sum(map(len, given)),
            "num_distinct": len(rows),
            "rows": rows[:_NUM_ROWS].tolist(),  # of the same samples on all ranks, if they are equal
        }
        for kind in _KINDS:
            values = self._hashes(kind)
            for name, is_sharded in (("whole", False), ("shard", True)):
                chosen = [int(value) for value, one in zip(values, watched) if one.is_sharded is is_sharded]
                facts[f"{kind} {name}"] = _digest(chosen)
        return facts

    def _hashes(self, kind: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._own.hashes.get(kind, np.zeros(len(self._names), dtype=np.int64))

    def _all(self, fact: str) -> list[Any]:
        return [theirs[fact] for theirs in self._ranks]

    def _is_equal(self, fact: str) -> bool:
        return all(theirs == self._ranks[0][fact] for theirs in self._all(fact))

    def _details(self, mine: object) -> list[Any]:
        """Return a value of each rank, after a difference was found in its hash. Collective."""
        return [json.loads(theirs) for theirs in gather_bytes(json.dumps(mine).encode())]

    def _agree(self) -> list[Finding]:
        """Return the findings of all ranks, those that only one rank sees included."""
        merged: dict[tuple[str, str], list[Finding]] = {}
        for found in self._details([asdict(one) for one in self._own.found]):
            for one in (Finding(**facts) for facts in found):
                merged.setdefault((one.stage, one.what), []).append(one)
        for same in merged.values():
            ranks = sorted({rank for one in same for rank in one.ranks})
            first = max(same, key=lambda one: one.difference or 0.0)
            self._found.append(replace(first, ranks=[] if len(ranks) == self._world_size else ranks))
        return self._found

    def _report(self, stage: Stage, what: str, do: str, **facts: Any) -> None:
        """Add something that all ranks find."""
        own = self._own
        self._found.append(Finding(update=own.update, stage=stage, what=what, do=do, line=own.line, **facts))

    def _note(self, stage: Stage, what: str, do: str, *, line: str = "", **facts: Any) -> None:
        """Add something that this rank finds alone."""
        own, line = self._own, line or self._own.line
        facts["ranks"] = [self._rank]
        own.found.append(Finding(update=own.update, stage=stage, what=what, do=do, line=line, **facts))

    def _sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        if is_alone():
            return numbers
        numbers = numbers.to(host_wire())
        dist.all_reduce(numbers)
        return numbers.cpu()

    # ---- data and random numbers -------------------------------------------------------------------------------------

    def _compare_samples(self) -> None:
        sets = [set(rows) for rows in self._all("rows")]
        nums, distinct = self._all("num_rows"), self._all("num_distinct")
        usable = [
            rank for rank in range(self._world_size) if nums[rank] and distinct[rank] >= _MOSTLY_DISTINCT * nums[rank]
        ]
        self.compared |= {"data"} if len(usable) > 1 else set()
        seen: dict[int, int] = {}
        shared: Counter[tuple[int, int]] = Counter()
        for rank in usable:
            for row in sets[rank]:
                first = seen.setdefault(row, rank)
                if first != rank:
                    shared[first, rank] += 1
        for (one, other), num in shared.most_common(1):
            smaller = min(len(sets[one]), len(sets[other]))
            if num < _MOSTLY_COMMON * smaller:
                continue
            if smaller < _MIN_ROWS:
                self.suspects_duplicates = True  # a few equal samples may be copies in the data
                continue
            self._report(
                "data",
                f"{num} of {smaller} samples in the batches of rank {other} are also in the batches of rank {one}",
                "pass the DataLoader to accelerator.prepare(), or give each rank its own part of the data (a "
                "DistributedSampler, split_dataset_by_node, or a seed per rank for data that is generated)",
                ranks=[one, other],
            )

    def _compare_generators(self, *, is_exact: bool) -> None:
        drawing = [rank for rank, draws in enumerate(self._all("draws_masks")) if draws]
        self.compared |= {"rng"} if len(drawing) > 1 else set()
        by_state: dict[int, list[int]] = {}
        for rank in drawing:
            by_state.setdefault(self._ranks[rank]["generator"], []).append(rank)
        equal = next((ranks for ranks in by_state.values() if len(ranks) > 1), None)
        if equal is None:
            return
        self.has_equal_masks = True
        if is_exact:
            self._report(
                "rng",
                f"{those(equal, 'rank')} draw the same dropout masks, because their generators have the same state",
                "remove the call that gives all ranks the same seed inside the loop (torch.manual_seed), or add the rank to "
                "the seed: set_seed(seed, device_specific=True)",
                ranks=equal,
            )

    # ---- replicas ----------------------------------------------------------------------------------------------------

    def _compare_hashes(self, kind: str, stage: Stage) -> None:
        """Compare tensors that must have the same bits on all ranks, or on all ranks that hold the same shard."""
        keys = self._all("shard")
        same_shard: dict[int, set[int]] = {}
        for key, digest in zip(keys, self._all(f"{kind} shard")):
            same_shard.setdefault(key, set()).add(digest)
        if self._is_equal(f"{kind} whole") and all(len(digests) == 1 for digests in same_shard.values()):
            return
        ranks = self._details(self._hashes(kind).tolist())
        tensors, odd = [], set()
        for i, one in enumerate(self._ledger.watched):
            groups = [[r for r in range(self._world_size) if keys[r] == key] for key in set(keys)]
            for group in groups if one.is_sharded else [list(range(self._world_size))]:
                different = _odd_ranks([ranks[r][i] for r in group])
                if different:
                    tensors.append(one.name)
                    odd |= {group[place] for place in different}
        if not tensors or (kind == "gradient" and any(found.stage in ("reduce", "clip") for found in self._found)):
            return
        if kind == "after" and any(found.stage in ("weights", "reduce", "scheduler") for found in self._found):
            return  # it follows from them
        what, do = _REPLICAS[kind]
        shown = what.format(tensors=those(tensors), ranks=those(sorted(odd), "rank"))
        self._report(stage, shown, do, tensors=tensors, ranks=sorted(odd))

    def _compare_buffers(self) -> None:
        self.compared |= {"buffers"} if self._own.forward.buffers else set()
        if self._is_equal("buffers"):
            return
        ranks = self._details(self._own.forward.static())
        common = [name for name in ranks[0] if all(name in theirs for theirs in ranks)]
        different = {name: _odd_ranks([theirs[name] for theirs in ranks]) for name in common}
        tensors = [name for name, odd in different.items() if odd]
        if not tensors:
            return
        odd = sorted({rank for name in tensors for rank in different[name]})
        self._report(
            "buffers",
            f"when the forward pass began, {those(tensors, 'buffer')} had different values on {those(odd, 'rank')}",
            "change buffers in the same way on every rank, load the same file on every rank, and call the prepared "
            "model, not the module inside it",
            tensors=tensors,
            ranks=odd,
        )

    # ---- sums over ranks ---------------------------------------------------------------------------------------------

    def _sums(self) -> torch.Tensor:
        """Return this rank's terms of everything that is summed over ranks in one message."""
        ledger, own = self._ledger, self._own
        mean = 1 / self._world_size
        weight = mean if self._averages else 1.0
        shares = torch.tensor([one.share if one.is_sharded else mean for one in ledger.watched], dtype=torch.float64)
        is_sharded = self._is_sharded()
        expected = ledger.local * weight + ledger.base[:, :NUM_BUCKETS] * shares[:, None]
        norms = ledger.norms * weight + ledger.base[:, NUM_BUCKETS].sqrt() * shares
        reduced = torch.where(is_sharded[:, None], ledger.reduced[:, :NUM_BUCKETS] * shares[:, None], 0.0)
        items = {one.micro_step: one.num_items for one in own.losses}
        known = [num for num in items.values() if num is not None]
        extra = [math.fsum(known), float(len(known) == len(items) > 0), *(clip.own for clip in own.clips)]
        parts = [expected, norms, reduced, ledger.counts, ledger.is_reduced.double(), ledger.is_unknown.double()]
        return torch.cat([*(part.reshape(-1) for part in parts), torch.tensor(extra, dtype=torch.float64)])

    def _is_sharded(self) -> torch.Tensor:
        return torch.tensor([one.is_sharded for one in self._ledger.watched], dtype=torch.bool)

    def _compare_sums(self, sums: torch.Tensor) -> None:
        num = len(self._names)
        sizes = [num * NUM_BUCKETS, num, num * NUM_BUCKETS, num, num, num]
        expected, norms, reduced, counts, are_reduced, are_unknown, extra = sums.split([*sizes, len(sums) - sum(sizes)])  # type: ignore[no-untyped-call]
        num_items, num_known, *powers = extra.tolist()
        self._compare_weights(num_items if num_known == self._world_size else None)
        self._compare_norms(powers)
        own = torch.where(self._is_sharded()[:, None], reduced.view(num, -1), self._ledger.reduced[:, :NUM_BUCKETS])
        is_compared = (are_reduced == self._world_size) & (are_unknown == 0) & torch.isfinite(norms)
        self._compare_gradients(expected.view(num, -1), own, norms, counts, is_compared)

    def _compare_norms(self, powers: Sequence[float]) -> None:
        for clip, power in zip(self._own.clips, powers):
            self.compared.add("clip")
            norm = power ** (1 / clip.norm_type)
            allowed = self._factor * clip.roundoff * math.sqrt(clip.num_elements) * norm
            if math.isfinite(norm) and math.isfinite(clip.norm) and abs(clip.norm - norm) > allowed:
                self._note(
                    "clip",
                    f"clip_grad_norm_() clipped by a norm of {clip.norm:.6g}, but the norm of the whole reduced gradient is "
                    f"{norm:.6g}",
                    "clip with accelerator.clip_grad_norm_(), after the last backward() of the update, with the parameters of the "
                    "prepared model",
                    difference=abs(clip.norm - norm) / norm,
                    line=clip.line,
                )

    def _compare_weights(self, total: float | None) -> None:
        """Compare each loss's weight with its share of the items of the update, or with that of its micro-step."""
        own, ranks = self._own, self._world_size if self._averages else 1
        for one in own.losses:
            weight = one.weight / ranks
            share = self._share(one, total)
            if share is None or not math.isfinite(weight):
                continue
            self.compared.add("loss weight")
            # The loss and its weight are each rounded once, and so is their product.
            allowed = 3 * one.roundoff * max(share, weight)
            if abs(weight - share) > allowed:
                items = f"{one.num_items:g} of {total:g} items" if one.num_items is not None else "no num_items"
                self._note(
                    "loss weight",
                    f"a loss has weight {weight:.6g} in the update, but its share is {share:.6g} ({items})",
                    "report this as a bug of echelon, with the loop",
                    difference=abs(weight - share) / (share or 1.0),
                    line=one.line,
                )
                return

    def _share(self, one: LossWeight, total: float | None) -> float | None:
        if one.num_items is not None and total is not None:
            return one.num_items / total if total else 0.0
        if one.num_items is None and self._own.num_micro_steps is not None:
            return 1 / (self._own.num_micro_steps * self._world_size)
        return None

    def _compare_gradients(
        self,
        expected: torch.Tensor,
        own: torch.Tensor,
        norms: torch.Tensor,
        counts: torch.Tensor,
        is_compared: torch.Tensor,
    ) -> None:
        """Compare the reduced gradients with the sums of the local ones.

        Each element is off by at most (number of additions and roundings) * (unit roundoff) * (sum of the absolute terms), so the norm
        of the error is at most that of the absolute sum, which is at most the sum of the norms; ``_factor`` turns the norm of an error
        into a bound for each bucket of its sketch.
        """
        ledger = self._ledger
        num_elements = torch.tensor([one.num_elements for one in ledger.watched], dtype=torch.float64)
        depths = counts + _LOCAL_ROUNDINGS
        float64 = torch.finfo(torch.float64).eps * num_elements.sqrt()  # of the sketches' own sums
        allowed = self._factor * (
            depths * (ledger.roundoffs * norms + ledger.spacings * num_elements.sqrt()) + float64 * norms
        )
        distances = torch.linalg.vector_norm(own - expected, dim=1)
        self.compared |= {"reduce"} if bool(is_compared.any()) else set()
        bad = (is_compared & (distances > allowed)).nonzero().flatten().tolist()
        if not bad:
            return
        sizes = torch.linalg.vector_norm(expected, dim=1)
        relative = {i: float(distances[i] / sizes[i]) if float(sizes[i]) else math.inf for i in bad}
        bad.sort(key=lambda i: -relative[i])
        tensors = [self._names[i] for i in bad]
        cause, do = self._cause(bad, expected, own, allowed)
        self._note(
            "reduce",
            f"the reduced gradient of {those(tensors)} is not the weighted sum of the local gradients of all ranks and micro-steps: "
            f"{cause}",
            do,
            tensors=tensors,
            difference=relative[bad[0]],
        )

    def _cause(
        self, bad: Sequence[int], expected: torch.Tensor, own: torch.Tensor, allowed: torch.Tensor
    ) -> tuple[str, str]:
        """Return the likely cause of the first differences, and what to do about it."""
        i, ledger, size = bad[0], self._ledger, self._world_size
        one, other = expected[i], own[i]
        ratio = float(one @ other / (one @ one)) if float(one @ one) else math.nan
        local = ledger.local[i]
        if size > 1 and not ledger.watched[i].is_sharded:
            for part in (local, local / size):
                if bool(torch.linalg.vector_norm(other - part) <= size * allowed[i]) and float(local @ local):
                    return (
                        "it is this rank's own gradient, so it was not reduced",
                        "let the prepared model's forward() use the parameter, and do not exclude it from DDP "
                        "(_ddp_params_and_buffers_to_ignore)",
                    )
        if math.isfinite(ratio) and bool(
            torch.linalg.vector_norm(other - ratio * one) <= max(abs(ratio), 1.0) * allowed[i]
        ):
            known = {
                1 / size: " (1 / number of ranks: averaged twice)",
                float(size): " (the number of ranks: added, not averaged)",
            }
            note = next(
                (text for value, text in known.items() if size > 1 and math.isclose(ratio, value, rel_tol=1e-3)), ""
            )
            return (
                f"it is {ratio:.4g} times that{note}",
                "remove what multiplies gradients inside the backward pass (hooks on parameters, or a communication hook)",
            )
        return (
            "part of it is missing or was changed during the reduction",
            "do not clear or change gradients between the micro-steps of an update (zero_grad, clipping, hooks); run the last "
            "backward() outside no_sync()",
        )

    # ---- changes between the backward pass and the step --------------------------------------------------------------

    def _compare_changes(self) -> None:
        """Report gradients that only some ranks changed after the reduction, or that each rank scaled in its own way."""
        changing = [rank for rank, num in enumerate(self._all("num_changed")) if num]
        if not changing:
            return
        ratios = self._all("ratio")
        known = [ratios[rank] for rank in changing if ratios[rank] is not None and math.isfinite(ratios[rank])]
        if len(known) == len(changing) == self._world_size and not _are_close(known, self._factor * self._coarsest()):
            shown = ", ".join(f"{ratios[rank]:.4g} on rank {rank}" for rank in changing[:4])
            self._report(
                "clip",
                f"after the backward pass, each rank multiplied its gradients by another number ({shown}), as if it had "
                "clipped by the norm of its own part",
                "clip with accelerator.clip_grad_norm_(model.parameters(), max_norm), which uses the norm of the whole gradient",
            )
        elif len(changing) < self._world_size:
            flags = self._details(self._ledger.changed.tolist())
            # Part of a sharded gradient may be on one rank (a mask for some rows), but no factor applies to one shard only.
            tensors = [
                one.name
                for i, one in enumerate(self._ledger.watched)
                if any(flags[rank][i] and (not one.is_sharded or ratios[rank] is not None) for rank in changing)
            ]
            if not tensors:
                return
            self._report(
                "reduce",
                f"after the reduction, something changed the gradient of {those(tensors)} on {those(changing, 'rank')} only",
                "change gradients in the same way on every rank, not under a condition on the rank or on the rank's own data",
                tensors=tensors,
                ranks=changing,
            )

    def _coarsest(self) -> float:
        return float(self._ledger.roundoffs.max()) if len(self._names) else 0.0

    # ---- settings and steps ------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, float]:
        several = len(self._own.steps) > 1
        return {
            f"{name}{f' of optimizer {k}' if several else ''}": value
            for k, steps in sorted(self._own.steps.items())
            for name, value in steps.settings.items()
        }

    def _compare_settings(self) -> None:
        if self._is_equal("settings"):
            return
        ranks = self._details(self._settings())
        for name in ranks[0]:
            values = [theirs.get(name) for theirs in ranks]
            odd = _odd_ranks(values)
            if odd:
                shown = ", ".join(
                    f"{values[rank]} on rank {rank}" for rank in sorted({0, odd[0], self._world_size - 1})
                )
                self._report(
                    "scheduler",
                    f"the ranks stepped with different settings: {name} is {shown}",
                    "call scheduler.step() the same number of times on every rank, and compute the values that it uses (a "
                    "validation loss) over all ranks: accelerator.reduce(loss, 'mean')",
                    ranks=odd,
                )
                return

    def _steps(self) -> list[tuple[int, int, int]]:
        return [(k, steps.num_steps, steps.num_skipped) for k, steps in sorted(self._own.steps.items())]

    def _compare_steps(self) -> bool:
        """Return whether all ranks took the same steps."""
        if self._is_equal("steps"):
            return True
        ranks = self._all("steps")
        odd = _odd_ranks([json.dumps(theirs) for theirs in ranks])
        shown = "; ".join(
            f"rank {rank}: {sum(num for _, num, _ in ranks[rank])} step(s), {sum(num for *_, num in ranks[rank])} skipped"
            for rank in sorted({0, *odd[:3]})
        )
        self._report(
            "optimizer",
            f"the ranks did not take the same optimizer steps with the update's gradients ({shown})",
            "call optimizer.step() once per update on every rank, not under a condition on the rank",
            ranks=odd,
        )
        return False


_REPLICAS = {
    "weights": (
        "before the step, {ranks} had different values of {tensors}",
        "change weights in the same way on every rank (load them before prepare(), and draw random numbers for them with the same "
        "generator), and call step() on every rank with the same learning rate",
    ),
    "gradient": (
        "{ranks} stepped with different gradients of {tensors}",
        "change gradients in the same way on every rank, not under a condition on the rank or on the rank's own data",
    ),
    "after": (
        "after the step, {ranks} had different values of {tensors}, although weights, gradients and settings were equal before",
        "load the same optimizer state on every rank, and use an optimizer that draws no random numbers of its own",
    ),
}


def _digest(value: object) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(value, sort_keys=True).encode())


def _odd_ranks(values: Sequence[Any]) -> list[int]:
    """Return the places of values that differ from most others; all places if there is no majority."""
    counted = Counter(values).most_common()
    if len(counted) <= 1:
        return []
    has_majority = counted[0][1] > len(values) / 2
    return [place for place, value in enumerate(values) if not has_majority or value != counted[0][0]]


def _are_close(values: Sequence[float], tolerance: float) -> bool:
    return max(values) - min(values) <= tolerance * max(map(abs, values))


def those(names: Sequence[object], kind: str = "") -> str:
    """Return the first of ``names`` in words."""
    shown = ", ".join(map(str, names[:_NUM_SHOWN]))
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{kind}{'s' * (len(names) > 1) if kind else ''}{' ' if kind else ''}{shown}{more}"


def allowed_factor(num_comparisons: int, *, number: int) -> float:
    """Return how many standard deviations rounding may take in check ``number`` (from 1) of a run.

    A union bound over all comparisons of all checks: the checks' shares of the allowed false alarms, ``6 / (pi * number)**2`` each, add
    up to 1.

    Source: Hoeffding's inequality for sums with random signs.
    """
    share = _FALSE_ALARMS * 6 / (math.pi * number) ** 2
    return math.sqrt(2 * math.log(2 * max(num_comparisons, 1) / share))
