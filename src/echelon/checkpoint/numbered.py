"""Checkpoints that are numbered in one folder: the newest, and how many are kept."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

__all__ = ["numbered", "remove_oldest"]


def numbered(folder: Path, *, prefix: str) -> list[Path]:
    """Return the folders ``prefix`` + number in ``folder`` by number; others (half-written ones, too) do not count."""
    if not folder.is_dir():
        return []
    name = re.compile(re.escape(prefix) + r"(\d+)")
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def remove_oldest(folder: Path, *, prefix: str, limit: int, keep: Path) -> None:
    """Delete the lowest numbers until ``limit`` folders are left; never ``keep``."""
    all_of_them = numbered(folder, prefix=prefix)
    surplus = [path for path in all_of_them if path.name != keep.name][: max(len(all_of_them) - max(limit, 1), 0)]
    for path in surplus:
        # Renamed first: when the deletion is interrupted, the rest is not taken for a checkpoint.
        doomed = path.with_name(f"{path.name}.old-{secrets.token_hex(4)}")
        path.rename(doomed)
        shutil.rmtree(doomed)
