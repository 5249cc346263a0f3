"""Whether a layout trains the same parameters as the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.verify.comparison.cause_catalogue import likely_cause
from echelon.verify.comparison.differences import Comparison, RunDifference
from echelon.verify.comparison.likely_cause import LikelyCause

__all__ = ["structure_cause", "structure_differences"]


def structure_differences(comparison: Comparison) -> Iterator[RunDifference]:
    """Yield parameters that only one of the runs has, or that are tied in only one of them."""
    update = comparison.layout.first_update - 1
    for index, theirs in comparison.reference.models.items():
        ours = comparison.layout.models.get(index)
        if ours is None or not set(ours.parameters) & set(theirs.parameters):
            continue
        known = {*theirs.parameters, *theirs.tied}
        for name in (one for one in ours.parameters if one in theirs.tied):
            values = f"{name} is a parameter of its own; in the reference run it is the same parameter as {theirs.tied[name]}"
            yield RunDifference(
                stage="initial weights", update=update, kind="structure", tensor=f"{index}:{name}", values=values
            )
        for name in (one for one in theirs.parameters if one in ours.tied):
            values = (
                f"{name} is the same parameter as {ours.tied[name]}; in the reference run it is a parameter of its own"
            )
            yield RunDifference(
                stage="initial weights", update=update, kind="structure", tensor=f"{index}:{name}", values=values
            )
        for name in (one for one in ours.parameters if one not in known):
            values = f"the reference run has no parameter {name}"
            yield RunDifference(
                stage="initial weights", update=update, kind="structure", tensor=f"{index}:{name}", values=values
            )
        for name in (one for one in theirs.parameters if one not in {*ours.parameters, *ours.tied}):
            values = f"the model has no parameter {name}, unlike that of the reference run"
            yield RunDifference(
                stage="initial weights", update=update, kind="structure", tensor=f"{index}:{name}", values=values
            )


def structure_cause(differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain them."""
    names = [one.tensor for one in differences]
    if any("parameter of its own" in one.values for one in differences):
        return likely_cause("tied weights", why=differences[0].values, tensors=names)
    return likely_cause("other parameters", why=differences[0].values, tensors=names)
