"""Finds this process's control groups, which hold the limits set by a container or scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["group_folders"]

_GROUPS = "sys/fs/cgroup"


def group_folders(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version (1 or 2) of each of this process's control groups; yields nothing on systems other than
    Linux.

    Args:
        controller: name of the controller: ``cpu``, ``memory`` or ``pids``.
        root: root of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if number == "0":
            folder, version = root / _GROUPS, 2
        elif controller in controllers.split(","):
            folder, version = root / _GROUPS / controller, 1
        else:
            continue
        path = PurePosixPath(group)
        # The limits of parent groups apply, too. In a container its own group may appear as the root.
        for name in (path, *path.parents):
            yield folder / str(name).lstrip("/"), version
