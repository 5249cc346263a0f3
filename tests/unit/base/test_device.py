"""The device of each rank on machines with and without accelerators."""

from __future__ import annotations

import pytest
import torch

from echelon.base.device import backend_of, choose_device, has_fp8, limit_devices, num_devices, use_device
from echelon.base.errors import ConfigError

VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES",
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    return Machine(monkeypatch)


class Machine:
    """A machine with accelerators, as torch.accelerator tells of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.current: int | None = None

    def has(self, count: int, kind: str = "cuda") -> None:
        self._patch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        self._patch.setattr(torch.accelerator, "device_count", lambda: count)
        self._patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind) if count else None)
        self._patch.setattr(torch.accelerator, "set_device_index", self._set)

    def _set(self, index: int) -> None:
        self.current = index


@pytest.mark.parametrize(
    ("count", "kind", "local_rank", "local_world_size", "cpu", "device"),
    [
        (4, "cuda", 0, 4, False, "cuda:0"),
        (4, "cuda", 3, 4, False, "cuda:3"),
        (0, "cuda", 5, 8, False, "cpu"),
        (2, "cuda", 7, 8, True, "cpu"),
        (1, "mps", 0, 1, False, "mps:0"),
        (1, "mps", 0, 2, False, "cpu"),
    ],
)
def test_each_local_rank_gets_its_own_device_or_the_cpu(
    machine: Machine, count: int, kind: str, local_rank: int, local_world_size: int, cpu: bool, device: str
) -> None:
    machine.has(count, kind)
    assert num_devices() == count
    found = choose_device(local_rank=local_rank, local_world_size=local_world_size, cpu=cpu)
    assert found == torch.device(device)


@pytest.mark.parametrize(("kind", "count", "visible"), [("xpu", 2, None), ("cuda", 2, "4,5"), ("cuda", 1, None)])
def test_more_processes_than_devices_is_an_error_with_the_maximum(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str, count: int, visible: str | None
) -> None:
    machine.has(count, kind)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError) as caught:
        choose_device(local_rank=3, local_world_size=4)
    devices = f"{count} {kind} device{'s' if count > 1 else ''}"
    assert caught.value.what == f"no device is left for local rank 3: this machine runs 4 processes but has {devices}"
    processes = f"{count} process{'es' if count > 1 else ''}"
    assert str(caught.value.do).startswith(f"start at most {processes} on this machine, or pass --cpu")


@pytest.mark.parametrize("name", VISIBLE)
def test_a_process_with_one_visible_device_uses_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine.has(1)
    monkeypatch.setenv(name, "3")
    assert choose_device(local_rank=3, local_world_size=4) == torch.device("cuda:0")


def test_the_error_names_the_visibility_variable_of_the_device_type(machine: Machine) -> None:
    for kind, variable in (("cuda", "CUDA_VISIBLE_DEVICES"), ("xpu", "ZE_AFFINITY_MASK")):
        machine.has(4, kind)
        assert limit_devices([0, 2]) == {variable: "0,2"}
    machine.has(1, "mps")
    with pytest.raises(ConfigError, match="echelon cannot select the visible mps devices"):
        limit_devices([0])
    machine.has(0)
    assert limit_devices([0, 2]) == {}


def test_the_chosen_device_becomes_the_current_one(machine: Machine) -> None:
    machine.has(4)
    use_device(torch.device("cuda:2"))
    assert machine.current == 2
    use_device(torch.device("cpu"))
    assert machine.current == 2


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl"), ("xpu:0", "cpu:gloo,xpu:xccl")],
)
def test_an_accelerator_has_its_own_backend_and_gloo_for_cpu_tensors(device: str, backend: str) -> None:
    assert backend_of(torch.device(device)) == backend


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((8, 9), None, True), ((9, 0), None, True), ((8, 6), None, False), ((9, 0), "6.4", False), ((9, 4), "6.4", True)],
)
def test_fp8_needs_ada_or_mi300(
    capability: tuple[int, int], hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert has_fp8(torch.device("cuda", 0)) is expected
    assert not has_fp8(torch.device("cpu"))
    assert not has_fp8(torch.device("mps"))
    assert has_fp8(torch.device("xpu"))  # torchao knows
