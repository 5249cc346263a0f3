"""The error raised for a damaged checkpoint."""

from __future__ import annotations

from echelon.base.errors import CheckpointError


def damaged(what: str) -> CheckpointError:
    """Return the error to raise for a damaged checkpoint; ``what`` describes the damage."""
    return CheckpointError(
        what,
        do="load another checkpoint; run `echelon checkpoint ls FOLDER --verify` to see which checkpoints are intact",
    )
