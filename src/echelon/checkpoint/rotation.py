"""Lists the numbered checkpoints in a folder and deletes the oldest ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import overload

from echelon.checkpoint import object_store, storage
from echelon.checkpoint.commit import place_of, retire
from echelon.checkpoint.object_store import Location, ObjectPath

_OLD = r"(?:\.old-[0-9a-f]{16})?"  # suffix after a crash between two renames


@overload
def numbered(folder: Path, *, prefix: str) -> list[Path]: ...
@overload
def numbered(folder: ObjectPath, *, prefix: str) -> list[ObjectPath]: ...
@overload
def numbered(folder: Location, *, prefix: str) -> Sequence[Location]: ...
def numbered(folder: Location, *, prefix: str) -> Sequence[Location]:
    """Return the paths in ``folder`` named ``prefix`` + number, sorted by number and excluding incomplete checkpoints.

    Files and broken links with a matching name are included, because their numbers are taken.
    """
    real = storage.real_path(folder)
    if storage.kind(real) != "folder":
        return []
    name = re.compile(re.escape(prefix) + r"(\d+)" + _OLD)
    found = {int(match[1]) for entry in storage.entries(real) if (match := name.fullmatch(entry))}
    paths = [folder / f"{prefix}{number}" for number in sorted(found)]
    return [path for path in paths if not isinstance(path, ObjectPath) or object_store.is_checkpoint(path)]


def surplus(
    numbers: Sequence[int], *, limit: int | None, keep: Collection[int] = (), keep_every: int | None = None
) -> list[int]:
    """Return the numbers of the checkpoints to delete, lowest first.

    Args:
        limit: maximum number of checkpoints to keep, not counting those kept because of ``keep_every``; None keeps all.
        keep: numbers that are counted but never deleted, such as those of the newest and the best checkpoint.
        keep_every: checkpoints whose number is a multiple of this are never deleted.
    """
    if limit is None:
        return []
    counted = [number for number in sorted(numbers) if not (keep_every and number % keep_every == 0)]
    return [number for number in counted if number not in keep][: max(len(counted) - max(limit, 1), 0)]


def best_of(
    paths: Sequence[Location], metric_of: Callable[[Location], float | None], *, number: int, greater_is_better: bool
) -> list[Location]:
    """Return up to ``number`` of ``paths`` (oldest first) with the best metrics, best first; the newer one wins a tie.

    Args:
        metric_of: returns the metric of a checkpoint; one without a metric (None or NaN) is never among the best.
    """
    found = [(metric, i) for i, path in enumerate(paths) if (metric := metric_of(path)) is not None]
    sign = 1 if greater_is_better else -1
    ranked = sorted(found, key=lambda one: (-sign * one[0], -one[1]))
    return [paths[i] for metric, i in ranked if not math.isnan(metric)][:number]


def remove_oldest(
    folder: Location,
    *,
    prefix: str,
    limit: int | None,
    keep: Collection[Location] = (),
    keep_every: int | None = None,
) -> Sequence[Location]:
    """Delete the lowest-numbered checkpoints, except ``keep``, until ``limit`` are left. Return the deleted paths.

    If a checkpoint is a symbolic link, only the link is deleted. Files and broken links are neither counted nor deleted.
    """
    folder = storage.real_path(folder)
    found = {int(path.name[len(prefix) :]): path for path in numbered(folder, prefix=prefix)}
    places = {number: place_of(path) for number, path in found.items()}
    places = {n: place for n, place in places.items() if storage.kind(storage.real_path(place)) == "folder"}
    kept = {number for number in places if found[number].name in {one.name for one in keep}}
    doomed = surplus(list(places), limit=limit, keep=kept, keep_every=keep_every)
    for number in doomed:
        retire(places[number])
    return [found[number] for number in doomed]
