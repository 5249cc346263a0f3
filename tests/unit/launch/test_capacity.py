"""Whether a machine can hold a number of processes, given its memory, user limits and container limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.base import limits
from echelon.base.errors import ConfigError
from echelon.base.limits import Room, room_for_memory, room_for_tasks
from echelon.launch.local import capacity
from echelon.launch.local.capacity import check_capacity

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def machine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cores: int = 2,
    memory: Room | None = None,
    tasks: Room | None = None,
    files: Room | None = None,
) -> None:
    monkeypatch.setattr(capacity, "usable_cores", lambda: cores)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    for name, room in (("memory", memory), ("tasks", tasks), ("files", files)):
        monkeypatch.setattr(capacity, f"room_for_{name}", lambda room=room: room)


def check(num_processes: int, *, imports_torch: bool = True, uses_cpu: bool = True) -> None:
    check_capacity(num_processes, origin="flag -n", imports_torch=imports_torch, uses_cpu=uses_cpu)


@pytest.mark.parametrize(("cores", "most"), [(1, 16), (2, 16), (4, 32), (64, 512)])
def test_processes_may_share_cores_but_too_many_are_rejected(
    cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, cores=cores)
    check(most)
    check(most + 1, uses_cpu=False)  # accelerators compute
    with pytest.raises(ConfigError, match=f"{most + 1} processes on {cores} cores") as raised:
        check(most + 1)
    assert raised.value.where == "flag -n"
    assert raised.value.do == f"use --num_processes {most} or fewer, or add --oversubscribe to start them anyway"


def test_one_process_per_core_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, cores=2)  # a container with a quota of two
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    check(64)


@pytest.mark.parametrize(
    ("room", "what", "do"),
    [
        (
            {"memory": Room(left=GIB, source="so")},
            "8 processes need 1.1 GiB of memory to import torch, but only 1.0 GiB",
            7,
        ),
        (
            {"tasks": Room(left=39, source="so")},
            "8 processes need 40 processes and threads, but only 39 are available",
            7,
        ),
        ({"files": Room(left=64 + 30, source="so")}, "8 processes need 40 open files in the launcher, but only 30", 6),
    ],
)
def test_errors_name_memory_and_limits_with_their_values(
    room: dict[str, Room], what: str, do: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, **room)  # type: ignore[arg-type]
    check(6)
    check(1)
    with pytest.raises(ConfigError) as raised:
        check(8)
    assert raised.value.what.startswith(what)
    assert raised.value.what.endswith("(so)")
    assert f"--num_processes {do} or fewer" in (raised.value.do or "")


def test_one_process_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, memory=Room(left=0, source="so"), tasks=Room(left=8, source="so"))
    check(8, imports_torch=False)
    check(1)  # that one process is too much is for it to say


def test_the_memory_of_the_machine_and_each_control_group_is_considered(tmp_path: Path) -> None:
    assert room_for_memory(tmp_path / "no linux") is None
    meminfo = "MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 1000 kB\nHugePages_Total: 0\n"
    root = write(tmp_path / "v2", {"proc/meminfo": meminfo, "proc/self/cgroup": "0::/job/step\n"})
    assert room_for_memory(root) == Room(left=5000 * 1024, source="MemAvailable and SwapFree of /proc/meminfo")
    job = root / "sys/fs/cgroup/job"
    stat = "anon 5\nfile 3000000\nshmem 1000000\n"
    write(job, {"memory.max": str(4_000_000), "memory.current": "3500000", "memory.stat": stat})
    write(job / "step", {"memory.max": "max", "memory.current": "1", "memory.stat": stat})
    found = room_for_memory(root)
    assert found is not None
    assert found.left == 2_500_000
    assert found.source == "memory.max of the control group is 0.0 GiB"
    old = write(
        tmp_path / "v1",
        {
            "proc/meminfo": meminfo,
            "proc/self/cgroup": "4:memory:/docker\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
            "sys/fs/cgroup/memory/memory.stat": "cache 5\n",
        },
    )
    assert room_for_memory(old) == Room(left=5000 * 1024, source="MemAvailable and SwapFree of /proc/meminfo")


def test_process_limits_are_considered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    stat = "7 (a) b) S 1 7 7 0 -1 4194304 1 0 0 0 1 1 0 0 20 0 30 0 99 1 1\n"
    root = write(tmp_path, {"proc/7/stat": stat, "proc/8/stat": stat, "proc/meminfo": "x", "proc/9/none": ""})
    found = room_for_tasks(root)
    assert found == Room(left=40, source="ulimit -u is 100, and this user has 60 processes and threads")
    write(root, {"proc/self/cgroup": "8:pids:/job\n"})
    write(root, {"sys/fs/cgroup/pids/job/pids.max": "64\n", "sys/fs/cgroup/pids/job/pids.current": "60\n"})
    found = room_for_tasks(root)
    assert found == Room(
        left=4, source="pids.max of the control group is 64, and the group has 60 processes and threads"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert limits.room_for_files() is None
    assert room_for_tasks(tmp_path / "elsewhere") is None
