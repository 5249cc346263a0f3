"""How many threads a process gets: the cores that it may use, shared; the user's number wins, bits do not depend on it; and which."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from echelon import Accelerator
from echelon.accelerator.setup import build_session as opening
from echelon.base import cores, device, environ
from echelon.base.cores import cores_of_node, share_of, threads_of_each, usable_cores
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.launch import environment


def system(root: Path, groups: str, **files: str) -> Path:
    """Write the files of a system, by their path with ``__`` for ``/``."""
    for name, text in {"proc__self__cgroup": groups, **files}.items():
        path = root / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cfs_", "cpu.cfs_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


@pytest.mark.usefixtures("sixteen")
def test_the_affinity_mask_and_the_quota_of_each_group_above_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "nothing") == 16
    group = "sys__fs__cgroup__job__step"
    two = system(tmp_path / "2", "0::/job/step\n", **{f"{group}__cpu_max": "max 100000\n"})
    assert usable_cores(two) == 16
    system(two, "0::/job/step\n", sys__fs__cgroup__job__cpu_max="650000 100000\n")
    assert usable_cores(two) == 6
    system(two, "0::/job/step\n", **{f"{group}__cpu_max": "50000 100000\n"})
    assert usable_cores(two) == 1
    folder = "sys__fs__cgroup__cpu__"  # the container's own group, seen as the root
    one = {f"{folder}cfs_quota_us": "400000\n", f"{folder}cfs_period_us": "100000\n"}
    assert usable_cores(system(tmp_path / "1", "8:pids:/x\n4:cpu,cpuacct:/docker/ab12\n", **one)) == 4
    one[f"{folder}cfs_quota_us"] = "-1\n"
    assert usable_cores(system(tmp_path / "1", "4:cpu,cpuacct:/docker/ab12\n", **one)) == 16


def test_the_processes_share_the_cores_and_each_has_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 6)
    assert [threads_of_each(n) for n in (1, 2, 4, 6, 64)] == [6, 3, 1, 1, 1]


def test_the_users_thread_count_overrides_and_one_process_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "threads_of_each", lambda n: 12 // n)
    resolved = resolve(RunConfig, [])

    def threads(num_processes: int, num_threads: int | None = None) -> str | None:
        variables = environment.rank_variables(
            resolved, num_processes=num_processes, num_threads=num_threads, has_accelerator=False
        )
        return variables.get("OMP_NUM_THREADS")

    with environ.patch({"OMP_NUM_THREADS": None}):
        assert [threads(4), threads(1), threads(4, 5), threads(1, 5)] == ["3", None, "5", "5"]
    with environ.patch({"OMP_NUM_THREADS": "7"}):
        assert [threads(4), threads(4, 5)] == [None, "5"]


def test_bits_do_not_depend_on_what_the_launcher_chose() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with environ.patch({"OMP_NUM_THREADS": "2", "ECHELON_CHOSEN_THREADS": "2"}):
            Accelerator(cpu=True, parity="bitwise", seed=1)  # two of the user's own would be an error
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


# ---- which cores ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each, numbered as Linux does: the second threads after all first ones."""
    for node, cores_of_it in (("node0", "0-3,8-11\n"), ("node1", "4-7,12-15\n")):
        system(tmp_path, "", **{f"sys__devices__system__node__{node}__cpulist": cores_of_it})
    for core in range(16):
        folder = f"sys__devices__system__cpu__cpu{core}__topology"
        system(tmp_path, "", **{f"{folder}__thread_siblings_list": f"{core % 8},{core % 8 + 8}\n"})
    return tmp_path


@pytest.mark.usefixtures("sixteen")
def test_a_share_has_whole_cores_of_one_node(two_nodes: Path) -> None:
    assert [sorted(share_of(rank, 2, two_nodes)) for rank in (0, 1)] == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 6, 7, 12, 13, 14, 15],
    ]
    assert [sorted(share_of(rank, 4, two_nodes)) for rank in (0, 3)] == [[0, 1, 8, 9], [6, 7, 14, 15]]
    shares = [share_of(rank, 3, two_nodes) for rank in range(3)]
    assert sorted(core for share in shares for core in share) == list(range(16))
    assert all(len(share_of(rank, 40, two_nodes)) == 1 for rank in range(40))
    assert sorted(cores_of_node(1, two_nodes)) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert cores_of_node(2, two_nodes) == frozenset()


def test_the_place_of_a_device_is_that_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    files = {"/sys/bus/pci/devices/0001:dc:00.0/numa_node": "3\n"}
    monkeypatch.setattr(Path, "read_text", lambda path, **_: files[str(path)])
    assert device.numa_node_of(torch.device("cuda", 0)) == 3
    files["/sys/bus/pci/devices/0001:dc:00.0/numa_node"] = "-1\n"
    assert device.numa_node_of(torch.device("cuda", 0)) == 0
    assert device.numa_node_of(torch.device("cpu")) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no processes")
def test_a_process_is_bound_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    opening._bind_to_cores.cache_clear()
    Accelerator(cpu=True)
    assert bound == []
    with environ.patch({"ACCELERATE_CPU_AFFINITY": "1"}):
        for _ in range(2):
            Accelerator(cpu=True)
    opening._bind_to_cores.cache_clear()
    assert bound == [frozenset(os.sched_getaffinity(0))]  # all of one process
