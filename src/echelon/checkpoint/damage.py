"""The error raised for a damaged checkpoint."""

from __future__ import annotations

from echelon.base.errors import CheckpointError
from echelon.base.messages.translation import gettext as _


def damaged(what: str) -> CheckpointError:
    """Return the error to raise for a damaged checkpoint; ``what`` describes the damage."""
    return CheckpointError(
        what,
        do=_("load another checkpoint: echelon checkpoint ls FOLDER --verify shows which checkpoints are intact"),
    )
