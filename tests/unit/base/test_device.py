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


def test_each_local_rank_gets_its_own_device(machine: Machine) -> None:
    machine.has(4)
    assert [choose_device(local_rank=rank, local_world_size=4) for rank in range(4)] == [
        torch.device("cuda:0"),
        torch.device("cuda:1"),
        torch.device("cuda:2"),
        torch.device("cuda:3"),
    ]


def test_a_machine_without_accelerators_uses_the_cpu(machine: Machine) -> None:
    machine.has(0)
    assert num_devices() == 0
    assert choose_device(local_rank=5, local_world_size=8) == torch.device("cpu")


def test_the_cpu_can_be_requested_on_a_machine_with_accelerators(machine: Machine) -> None:
    machine.has(2)
    assert num_devices() == 2
    assert choose_device(local_rank=7, local_world_size=8, cpu=True) == torch.device("cpu")


def test_more_processes_than_devices_is_an_error_with_the_maximum(machine: Machine) -> None:
    machine.has(2, "xpu")
    with pytest.raises(ConfigError) as caught:
        choose_device(local_rank=2, local_world_size=4)
    assert (
        caught.value.what == "no device is left for local rank 2: this machine runs 4 processes but has 2 xpu devices"
    )
    assert str(caught.value.do).startswith("start at most 2 processes on this machine, or pass --cpu")


@pytest.mark.parametrize("name", VISIBLE)
def test_a_process_with_one_visible_device_uses_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine.has(1)
    monkeypatch.setenv(name, "3")
    assert choose_device(local_rank=3, local_world_size=4) == torch.device("cuda:0")


def test_more_processes_than_visible_devices_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.has(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="runs 4 processes but has 2 cuda devices"):
        choose_device(local_rank=3, local_world_size=4)


def test_one_unassigned_device_is_not_shared(machine: Machine) -> None:
    machine.has(1)
    with pytest.raises(ConfigError, match="runs 4 processes but has 1 cuda device"):
        choose_device(local_rank=3, local_world_size=4)


def test_one_process_uses_mps_and_several_use_the_cpu(machine: Machine) -> None:
    machine.has(1, "mps")
    assert choose_device(local_rank=0, local_world_size=1) == torch.device("mps:0")
    assert choose_device(local_rank=0, local_world_size=2) == torch.device("cpu")


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
