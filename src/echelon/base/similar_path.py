"""Suggests an existing path for one that does not exist."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from echelon.base.messages.translation import gettext as _


def suggest_path(path: str | Path, *, otherwise: str) -> str:
    """Return advice that names the path beside the missing ``path`` that resembles it most, or ``otherwise``."""
    missing = Path(path)
    try:
        near = get_close_matches(missing.name, os.listdir(missing.parent), n=1, cutoff=0.75)
    except OSError:
        near = []
    return _("did you mean {near}?", near=missing.parent / near[0]) if near else otherwise
