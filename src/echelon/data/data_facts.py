"""The facts that a position in a pass depends on (samples, batch size, order, contents), for comparison on resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from echelon.base.lengths import length_of
from echelon.data.exact.exact_batches import ExactOptions
from echelon.data.order_state import samples_of_a_step
from echelon.data.sharding.sample_order import SeedableRandomSampler
from echelon.distributed.checks.data_fingerprint import ColumnFingerprint, are_of_different_data, column_fingerprints


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Facts about one loader's data. None means unknown, and never counts as a change."""

    num_samples: int | None = None
    """Length of the dataset."""
    num_drawn: int | None = None
    """Number of samples in a pass, if a torch sampler draws a number that differs from ``num_samples``."""
    batch_size: int | None = None
    """The loader's batch size, which is the global batch size in the exact modes and with split_batches."""
    split_batches: bool = False
    num_batches: int | None = None
    """Number of batches in a pass, if a batch sampler yields batches of different sizes."""
    order: str | None = None
    seed: int | None = None
    """Seed for an order that depends only on (seed, epoch), in the exact modes."""
    columns: Mapping[str, tuple[int, bool]] | None = None
    """Fingerprint of each column's contents: (value, whether the column varies between reads)."""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON-serializable data."""
        found = asdict(self)
        found["columns"] = {name: list(column) for name, column in (self.columns or {}).items()}
        return found

    def with_stable_columns(self, before: DataFacts) -> DataFacts:
        """Return these facts with only those columns that match the columns in ``before``."""
        then, now = before.columns or {}, self.columns or {}
        return replace(self, columns={name: column for name, column in now.items() if then.get(name) == column})

    @staticmethod
    def from_json(stored: Mapping[str, Any] | None) -> DataFacts:
        """Create facts from the result of ``to_json``, from this or another version of echelon."""
        names = {item.name for item in fields(DataFacts)}
        known = {name: value for name, value in (stored or {}).items() if name in names}
        if known.get("columns") is not None:
            known["columns"] = {name: (value, varies) for name, (value, varies) in known["columns"].items()}
        return DataFacts(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChange:
    """A fact that has changed."""

    fact: str
    """What has changed: ``samples``, ``batches`` (their sizes) or ``order``."""
    what: str
    """Description of the change, with both values."""


def facts_of_data(
    loader: Any, *, sampler: Any, batches: Any, split_batches: bool, exact: ExactOptions | None
) -> DataFacts:
    """Return the facts about the user's ``loader``.

    Args:
        sampler: the sampler that currently determines its order.
        batches: its batch sampler, or None for iterable data.
        exact: options for the exact modes, or None in other modes.
    """
    is_iterable = isinstance(loader.dataset, IterableDataset)
    size = getattr(batches, "batch_size", None) if batches is not None else loader.batch_size
    size = size if isinstance(size, int) else None
    order, drawn, seed = None, None, None
    if batches is not None and type(batches) is not BatchSampler:
        order = f"that of {type(batches).__name__}"
    elif batches is not None:
        order = _order_of(sampler)
        if type(sampler).__module__ == "torch.utils.data.sampler":
            drawn = known_length(length_of(sampler))
        if exact is not None and isinstance(sampler, RandomSampler):
            seed = exact.seed
            order = f"{order} ({exact.order})"
    num_samples = known_length(length_of(loader.dataset))
    return DataFacts(
        num_samples=num_samples,
        num_drawn=None if drawn == num_samples else drawn,
        batch_size=size,
        split_batches=split_batches and exact is None,
        # In the exact modes the length of a batch sampler may depend on the number of processes, which may change.
        num_batches=known_length(length_of(batches))
        if size is None and batches is not None and exact is None
        else None,
        order=order,
        seed=seed,
        columns=None
        if is_iterable
        else {name: (one.value, one.varies) for name, one in column_fingerprints(loader.dataset).items()},
    )


def _order_of(sampler: Any) -> str:
    if isinstance(sampler, SeedableRandomSampler):
        return f"shuffled by (seed, epoch){' with replacement' if sampler.replacement else ''}"
    if type(sampler) is SequentialSampler:
        return "in sequence"
    if type(sampler) is RandomSampler:
        return f"shuffled{' with replacement' if sampler.replacement else ''}"
    return f"that of {type(sampler).__name__}"


def known_length(length: int | None) -> int | None:
    """Return ``length``, or None if it is -1."""
    return None if length == -1 else length


def changes_between(saved: DataFacts, here: DataFacts, *, num_ranks_saved: int, num_ranks: int) -> Sequence[DataChange]:
    """Return the facts that have changed, except for facts that are unknown on either side."""
    found = []
    for name, what in (("num_samples", "samples"), ("num_drawn", "samples in a pass")):
        then, now = getattr(saved, name), getattr(here, name)
        if then is not None and now is not None and then != now:
            found.append(DataChange(fact="samples", what=f"it had {then} {what} but now has {now}"))
    then, now = _samples_of_a_step(saved, num_ranks_saved), _samples_of_a_step(here, num_ranks)
    is_same_step = num_ranks_saved == num_ranks and then == now
    if None not in (then, now) and saved.batch_size != here.batch_size and not is_same_step:
        found.append(
            DataChange(fact="batches", what=f"its batch_size was {saved.batch_size} but is now {here.batch_size}")
        )
    elif None not in (saved.num_batches, here.num_batches) and saved.num_batches != here.num_batches:
        found.append(
            DataChange(
                fact="batches", what=f"it had {saved.num_batches} batches per pass but now has {here.num_batches}"
            )
        )
    if None not in (saved.order, here.order) and saved.order != here.order:
        found.append(DataChange(fact="order", what=f"its order was {saved.order} but is now {here.order}"))
    elif None not in (saved.seed, here.seed) and saved.seed != here.seed:
        found.append(DataChange(fact="order", what=f"the seed for its order was {saved.seed} but is now {here.seed}"))
    if not found and saved.columns and here.columns:
        one, other = _columns(saved.columns), _columns(here.columns)
        if are_of_different_data(one, other):
            names = [name for name in sorted(one.keys() & other.keys()) if one[name] != other[name]]
            values = f"{one[names[0]].value:x} but is now {other[names[0]].value:x}"
            found.append(
                DataChange(
                    fact="samples",
                    what=f"the contents of its samples have changed: the fingerprint of {', '.join(names[:3])} was "
                    f"{values}",
                )
            )
    return found


def _samples_of_a_step(facts: DataFacts, num_ranks: int) -> int | None:
    return samples_of_a_step(facts.batch_size, split_batches=facts.split_batches, num_ranks=num_ranks)


def _columns(stored: Mapping[str, tuple[int, bool]]) -> dict[str, ColumnFingerprint]:
    return {name: ColumnFingerprint(value=value, varies=varies) for name, (value, varies) in stored.items()}


# ---- the position in a pass ------------------------------------------------------------------------------------------------


def moved_position(
    state: Mapping[str, Any], saved: DataFacts, here: DataFacts, changes: Sequence[DataChange], *, num_ranks: int
) -> tuple[dict[str, Any], str]:
    """Return a loader's ``order_state`` adapted to the current data, and a description of its position in the pass.

    Args:
        num_ranks: number of ranks, which is the same in both runs.
    """
    facts = {change.fact for change in changes}
    of = "" if here.num_samples is None else f" of {here.num_samples}"
    tail = "the rest of the epoch follows the current order, so some of its samples may be repeated or skipped"
    exact, record = state.get("exact"), state.get("pass")
    moved = {key: value for key, value in state.items() if key != "data"}
    if exact is not None:
        source = exact["source"]
        if "order" in facts and source is not None and "order" in source:
            moved["exact"] = {**exact, "source": {**source, "order": None}}
        words = f"after {exact['position']}{of} samples"
        return moved, words if facts == {"batches"} else f"{words}; {tail}"
    if "order" in facts:
        moved["order"] = None
    if record is None:
        return moved, "where the script starts (skip_first_batches)"
    size, size_here = _samples_of_a_step(saved, num_ranks), _samples_of_a_step(here, num_ranks)
    given, used = record["num_given"], None if size is None else record["num_given"] * size
    if "batches" in facts and used is not None and size_here is not None:
        given = used // size_here
    moved["pass"] = {**record, "num_given": given, "order": None if "order" in facts else record["order"]}
    if used is None or size_here is None:
        return moved, f"after {given} batches; {tail}"
    words = f"after {given * size_here}{of} samples"
    if facts != {"batches"}:
        return moved, f"{words}; {tail}"
    return moved, f"{words}; {used - given * size_here} of the {used} samples used so far will be repeated"
