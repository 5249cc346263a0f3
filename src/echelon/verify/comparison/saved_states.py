"""Whether a checkpoint holds the state of the run, and whether a resumed run begins with what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from echelon.verify.comparison.alignment import AlignedRun, RecordedTensor, whole_tensors
from echelon.verify.comparison.cause_catalogue import LikelyCause, likely_cause
from echelon.verify.comparison.differences import Comparison, RunDifference
from echelon.verify.comparison.wording import listed
from echelon.verify.trace import Content, SketchedTensors

_States: TypeAlias = list[tuple[int, SketchedTensors]]
"""Ranks and events of one checkpoint; a rank that holds whole tensors and shards has one event of each kind."""


def _states(run: AlignedRun, content: Literal["saved", "loaded"]) -> dict[tuple[int, str], _States]:
    """Return the saved or loaded states by (update, path)."""
    result: dict[tuple[int, str], _States] = {}
    for rank, one in run.states(content):
        result.setdefault((one.update, one.path), []).append((rank, one))
    return result


def _line(states: _States) -> str:
    return next((one.line for _, one in states if one.line), "")


def _model_of(name: str) -> int | None:
    """Return the number of the model in ``"0:weight"`` or ``"buffer 0:mean"``."""
    number, colon, _ = name.removeprefix("buffer ").partition(":")
    return int(number) if colon and number.isdigit() else None


def _live(run: AlignedRun, update: int) -> dict[str, RecordedTensor]:
    """Return weights, optimizer state and buffers after ``update``, named as in a saved state."""
    result = {**run.tensors(update, "weights"), **run.tensors(update, "optimizer_state")}
    return result | {f"buffer {name}": one for name, one in run.tensors(update, "buffers").items()}


def save_differences(comparison: Comparison) -> Iterator[RunDifference]:
    """Yield tensors that a checkpoint of the layout holds with different values than the run had."""
    run = comparison.layout
    for (update, path), states in _states(run, "saved").items():
        saved = whole_tensors(states)
        line = _line(states)
        candidates = [live for near in (update, update - 1) if (live := _live(run, near))]
        if not candidates or update not in range(run.first_update, run.end_update + 1):
            continue
        wrong = min(
            ([name for name in live if name in saved and not _equal(saved[name], live[name])] for live in candidates),
            key=len,
        )
        live = candidates[0]
        first = min((model for model in map(_model_of, saved) if model is not None), default=None)
        if first is not None:  # earlier models belong to a part of the script that has ended
            lacking = [one for one in live if one not in saved and "/" not in one and (_model_of(one) or 0) >= first]
        else:
            lacking = []
        wrong = wrong + lacking
        compared = sum(1 for name in live if name in saved)
        comparison.passed(update, "save", count=compared - len(wrong) if compared > len(wrong) else 0)
        for name in wrong:
            distance = saved[name].whole.distance(live[name].whole) if name in saved else live[name].whole.norm
            values = (
                f"{path} does not contain it"
                if name in lacking
                else f"{path} contains different values than the run has"
            )
            yield RunDifference(
                "save",
                update,
                "missing" if name in lacking else "saved",
                tensor=name,
                distance=distance,
                norm=live[name].whole.norm,
                values=values,
                line=line,
            )


def load_differences(comparison: Comparison) -> Iterator[RunDifference]:
    """Yield tensors that the layout loaded with different values than were saved."""
    run = comparison.layout
    # Of each path, the newest save before the load: a script may write to the same folder again.
    saves = [*_states(comparison.reference, "saved").items(), *_states(run, "saved").items()]
    for (update, path), states in _states(run, "loaded").items():
        loaded = whole_tensors(states)
        source = next((saved for (at, other), saved in reversed(saves) if other == path and at <= update), None)
        line = _line(states)
        if source is None:
            continue
        saved = whole_tensors(source)
        for name, tensor in saved.items():
            one = loaded.get(name)
            if name == "rng" and len(tensor.by_rank) != len(one.by_rank if one else {}):
                continue
            if one is not None and _equal(one, tensor):
                comparison.passed(update, "load")
                continue
            yield RunDifference(
                "load",
                update,
                "missing" if one is None else "loaded",
                tensor=name,
                distance=tensor.whole.norm if one is None else one.whole.distance(tensor.whole),
                norm=tensor.whole.norm,
                values="it is not restored" if one is None else "it has different values than were saved",
                line=line,
            )


def resume_differences(comparison: Comparison) -> Iterator[RunDifference]:
    """Yield tensors with which the second process of a resumed run began although the first one ended with other values."""
    run = comparison.layout
    assert run.resumed_at is not None
    kinds: tuple[Content, ...] = ("weights", "buffers", "optimizer_state")
    for kind in kinds:
        ended, began = run.tensors(run.resumed_at - 1, kind), run.resumed_tensors(kind)
        for name in [one for one in ended if one in began]:
            if _equal(began[name], ended[name]):
                comparison.passed(run.resumed_at - 1, "load")
                continue
            yield RunDifference(
                "load",
                run.resumed_at - 1,
                "loaded",
                tensor=name,
                distance=began[name].whole.distance(ended[name].whole),
                norm=ended[name].whole.norm,
                values="it has different values than when the run was interrupted",
            )


def _equal(first: RecordedTensor, second: RecordedTensor) -> bool:
    if first.whole.has_bits_of(second.whole):
        own = {one.bits for one in first.by_rank.values()}
        # Copies of all ranks must be what was saved, too; generators differ between ranks.
        return first.is_sharded or len(own) == 1 or own == {one.bits for one in second.by_rank.values()}
    return False


def save_cause(differences: list[RunDifference]) -> LikelyCause:
    """Explain a checkpoint that does not hold the state of the run."""
    names = [one.tensor for one in differences]
    line = next((one.line for one in differences if one.line), "")
    if all(one.kind == "missing" for one in differences):
        why = f"the checkpoint does not contain {listed(names)}"
        return likely_cause("state missing from the checkpoint", why=why, line=line)
    why = f"not the values that the run had before or after this update: {listed(names)}"
    return likely_cause("wrong state saved", why=why, line=line)


def load_cause(comparison: Comparison, differences: list[RunDifference]) -> LikelyCause:
    """Explain state that is not what was saved."""
    names = [one.tensor for one in differences]
    line = next((one.line for one in differences if one.line), "")
    missing = [one.tensor for one in differences if one.kind == "missing"]
    if missing and len(missing) == len(names):
        return likely_cause("not restored", why=f"saved, but not loaded: {listed(missing)}", line=line)
    if names and all(name == "rng" for name in names):
        return likely_cause(
            "generators not restored", why="the random number generators are not in their saved state", line=line
        )
    buffers = {f"{index}:{name}" for index, model in comparison.layout.models.items() for name in model.buffers}
    kinds = {_kind_of(name, buffers) for name in names}
    words = {
        "buffer": "buffers",
        "lr": "learning rates",
        "rng": "generators",
        "position": "position in the data",
        "state": "optimizer state",
        "weights": "weights",
    }
    parts = " and ".join(sorted(words[kind] for kind in kinds))
    begin = comparison.layout.resumed_at or comparison.layout.first_update
    other = _other_update(comparison, names)
    if other is not None:
        why = f"the run continues with the {parts} of update {other}, not of update {begin - 1}"
        return likely_cause("state of a different update", why=why, line=line)
    return likely_cause(
        "PARTS not restored",
        name=f"{parts} not restored",
        why=f"not the values that were saved: {listed(names)}",
        line=line,
    )


def _kind_of(name: str, buffers: set[str]) -> str:
    if name.startswith(("lr", "rng", "position")):
        return name.split(" ")[0]
    if name.startswith("buffer") or name in buffers:
        return "buffer"
    return "state" if "/" in name else "weights"


def _other_update(comparison: Comparison, names: list[str]) -> int | None:
    """Return the update after which the reference had the weights that the layout begins with."""
    run = comparison.layout
    begin = run.resumed_at or run.first_update
    ours = run.tensors(begin - 1, "weights") if run.resumed_at is None else run.resumed_tensors("weights")
    wrong = [name for name in names if name in ours]
    for other in range(comparison.reference.first_update, comparison.reference.end_update):
        theirs = comparison.reference.tensors(other, "weights")
        if other != begin - 1 and wrong and all(name in theirs for name in wrong):
            limits = [
                comparison.allowed.get((other, "weights"), {}).get(
                    name, comparison.roundoff_of(name) * theirs[name].whole.norm
                )
                for name in wrong
            ]
            if all(
                ours[name].whole.distance(theirs[name].whole) <= limit
                for name, limit in zip(wrong, limits, strict=True)
            ):
                return other
    return None
