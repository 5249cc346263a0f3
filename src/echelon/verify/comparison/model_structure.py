"""Whether a layout trains the same parameters as the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
            values = f"{name} is a parameter of its own; in the reference it is {theirs.tied[name]}"
            yield RunDifference(
                stage="initial weights", update=update, kind="structure", tensor=f"{index}:{name}", values=values
            )
        for name in (one for one in theirs.parameters if one in ours.tied):
            values = f"{name} is {ours.tied[name]}; in the reference it is a parameter of its own"
            yield RunDifference(
                stage="initial weights", update=update, kind="structure", tensor=f"{index}:{name}", values=values
            )
        for name in (one for one in ours.parameters if one not in known):
            values = f"the reference has no parameter {name}"
            yield RunDifference(
                stage="initial weights", update=update, kind="structure", tensor=f"{index}:{name}", values=values
            )
        for name in (one for one in theirs.parameters if one not in {*ours.parameters, *ours.tied}):
            values = f"the layout has no parameter {name}"
            yield RunDifference(
                stage="initial weights", update=update, kind="structure", tensor=f"{index}:{name}", values=values
            )


def structure_cause(differences: Sequence[RunDifference]) -> LikelyCause:
    """Explain them."""
    names = [one.tensor for one in differences]
    if any("parameter of its own" in one.values for one in differences):
        return LikelyCause(
            name="tied weights",
            why=differences[0].values,
            do="tie the weights again after wrapping, sharding or loading the model, so that all names are one parameter",
            tensors=names,
        )
    return LikelyCause(
        name="other parameters",
        why=differences[0].values,
        do="build the same model on every layout",
        tensors=names,
    )
