"""The memory, processes and files still available within the limits of the machine, user and container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much of a resource is left."""

    left: int
    source: str
    """Description of the limit."""


def room_for_memory(root: Path = Path("/")) -> Room | None:
    """Return how many bytes can be allocated before the kernel kills processes, or None if unknown."""
    return _smallest([*_memory_of_machine(root), *_memory_of_groups(root)])


def room_for_tasks(root: Path = Path("/")) -> Room | None:
    """Return how many processes and threads this user can still start, or None if no limit is known."""
    return _smallest([*_tasks_of_groups(root), *_tasks_of_user(root)])


def room_for_files() -> Room | None:
    """Return how many files this process can have open, or None if there is no limit."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return Room(left=limit, source=f"ulimit -n is {limit}")


def group_folders(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version (1 or 2) of each of this process's control groups; yields nothing on systems other than
    Linux.

    Args:
        controller: name of the controller: ``cpu``, ``memory`` or ``pids``.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            folder, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            folder, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        path = PurePosixPath(group)
        # The limits of parent groups apply, too. In a container its own group may appear as the root.
        for name in (path, *path.parents):
            yield folder / str(name).lstrip("/"), version


def text_of(path: Path) -> str:
    """Return the text of a file in which the system describes itself; empty if there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system
        return ""


def _smallest(rooms: list[Room]) -> Room | None:
    return min(rooms, key=lambda room: room.left, default=None)


def _memory_of_machine(root: Path) -> Iterator[Room]:
    with suppress(OSError, ValueError, KeyError):  # not Linux
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
        free_kib = fields["MemAvailable"] + fields.get("SwapFree", 0)
        yield Room(left=free_kib * 1024, source="MemAvailable and SwapFree of /proc/meminfo")


def _memory_of_groups(root: Path) -> Iterator[Room]:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
        2: ("memory.max", "memory.current", "file"),
    }
    for folder, version in group_folders("memory", root):
        limit_file, usage_file, cache = names[version]
        with suppress(OSError, ValueError):  # the limit is "max", or the root group has no such file
            limit = int((folder / limit_file).read_text(encoding="ascii"))
            usage = int((folder / usage_file).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            files = int(stat.get(cache, 0)) - int(stat.get("shmem", 0))  # the page cache can be reclaimed
            left = max(0, limit - usage + files)
            yield Room(left=left, source=f"{limit_file} of the control group is {limit / 2**30:.1f} GiB")


def _tasks_of_groups(root: Path) -> Iterator[Room]:
    for folder, _ in group_folders("pids", root):
        with suppress(OSError, ValueError):
            limit, now = (int((folder / name).read_text(encoding="ascii")) for name in ("pids.max", "pids.current"))
            yield Room(
                left=max(0, limit - now),
                source=f"pids.max of the control group is {limit}, and the group has {now} processes and threads",
            )


def _tasks_of_user(root: Path) -> Iterator[Room]:
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return
    if not hasattr(resource, "RLIMIT_NPROC") or os.geteuid() == 0:  # root is exempt
        return
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY:
        return
    now = _num_tasks(os.getuid(), root)
    yield Room(left=max(0, limit - now), source=f"ulimit -u is {limit}, and this user has {now} processes and threads")


def _num_tasks(user: int, root: Path) -> int:
    total = 0
    with suppress(FileNotFoundError, NotADirectoryError):  # not Linux: the current number is unknown
        for entry in os.scandir(root / "proc"):
            with suppress(OSError, IndexError, ValueError):  # the process has just exited
                if entry.name.isdigit() and entry.stat().st_uid == user:
                    text = Path(entry.path, "stat").read_text(encoding="ascii", errors="replace")
                    total += int(text.rpartition(")")[2].split()[17])
    return total
