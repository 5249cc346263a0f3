"""Common devices, links within a machine and networks between machines, from their data sheets.

Bandwidths are in bytes per second and direction. The memory is what drivers report, which is less than the name of a card says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType

from echelon.base.device import num_devices, total_memory
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.peak_flops import peak_flops
from echelon.plan.facts import Cluster


@dataclass(frozen=True, slots=True)
class Device:
    """What a step's time depends on: FLOP/s by dtype without sparsity, and bytes per second of its memory."""

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    nvlink: float = 0.0
    """Of its direct links to other devices, in one direction; 0: it has none."""

    def peak(self, dtype: str) -> float:
        """Return FLOP/s for matrix products in ``dtype``; an unknown dtype computes as float32."""
        return self.flops.get(dtype, self.flops["float32"])


@dataclass(frozen=True, slots=True)
class Link:
    """A way between ranks. ``latency`` is the seconds until a message's first byte arrives."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """The device, the link within a machine, the network between machines (of a machine, not of a device), and the way to host memory."""

    device: Device
    link: Link
    network: Link
    host: Link
    is_known: bool = True
    """False: the user named no device, so times only compare layouts."""
    overlaps: bool = True
    """Whether collectives run beside computation; not on CPUs, whose cores do both."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """By kind of collective, what it reaches in place of ``link``: gloo's all_gather and reduce_scatter are not rings."""
    dispatch: float = 5e-6
    """Seconds in which the host starts an operator. A device that computes faster waits for it. A rule of thumb, as is ``hooks``."""
    hooks: float = 150e-6
    """Seconds in which the host runs fully_shard's hooks of a unit, in one pass."""


def _device(
    name: str,
    gib: float,
    gb_per_s: float,
    float32: float,
    *,
    float16: float | None = None,
    float8: float = 0.0,
    nvlink: float = 0.0,
    has_bf16: bool = True,
) -> Device:
    half = peak_flops(name) if float16 is None else float16 * 1e12
    assert half is not None, name
    flops = {"float32": float32 * 1e12, "float16": half, "float64": float32 * 1e12 / 2}
    if has_bf16:  # older devices compute bfloat16 in float32
        flops["bfloat16"] = half
    if float8:
        flops["float8"] = float8 * 1e12
    return Device(name, int(gib * 2**30), gb_per_s * 1e9, MappingProxyType(flops), nvlink * 1e9)


_DEVICES = {
    device.name: device
    for device in (
        _device("T4", 14.6, 320, 8.1, float16=65, has_bf16=False),
        _device("V100 16GB", 15.8, 900, 15.7, nvlink=150, has_bf16=False),
        _device("V100 32GB", 31.7, 900, 15.7, nvlink=150, has_bf16=False),
        _device("A10", 22.1, 600, 31.2),
        _device("A100 40GB", 39.4, 1555, 19.5, nvlink=300),
        _device("A100 80GB", 79.2, 2039, 19.5, nvlink=300),
        _device("L4", 22.0, 300, 30.3, float8=242),
        _device("L40S", 44.4, 864, 91.6, float8=733),
        _device("RTX 3090", 23.6, 936, 35.6),
        _device("RTX 4090", 23.5, 1008, 82.6, float8=330),
        _device("RTX 5090", 31.4, 1792, 104.8, float8=419),
        _device("H100", 79.1, 3350, 66.9, float8=1979, nvlink=450),
        _device("H100 PCIe", 79.1, 2000, 51.2, float8=1513),
        _device("H200", 139.8, 4800, 66.9, float8=1979, nvlink=450),
        _device("B200", 178.3, 8000, 80.0, float8=4500, nvlink=900),
        _device("MI250", 63.9, 1638, 45.3, nvlink=150),  # one of the two devices of a card
        _device("MI300X", 191.7, 5300, 163.4, float8=2615, nvlink=448),
    )
}
_DEFAULT_DEVICE = "A100 80GB"
_LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "nvlink": Link(300e9, 5e-6),  # replaced by that of the device, if it has one
        "pcie3": Link(12e9, 10e-6),
        "pcie4": Link(24e9, 10e-6),
        "pcie5": Link(48e9, 10e-6),
    }
)
_ETHERNET = Link(1.25e9, 50e-6)  # 10 Gb/s
_NETWORK = re.compile(r"(\d+)\s*gb(?:it)?(?:/s|ps)?", re.IGNORECASE)


def device_names() -> list[str]:
    """Return the names of all devices in the table."""
    return list(_DEVICES)


def find_device(name: str) -> Device:
    """Return the device with this name, such as "a100-80gb" or "NVIDIA H100 80GB HBM3".

    Raises:
        ConfigError: the table has no such device.
    """
    words = _words(name)
    found = [device for device in _DEVICES.values() if all(word in words for word in _words(device.name))]
    if not found:  # "A100" is the smaller of two
        found = [
            device for device in _DEVICES.values() if words and all(word in _words(device.name) for word in words)
        ][:1]
    if not found:
        near = get_close_matches(name.upper(), _DEVICES, n=1)
        raise ConfigError(
            f"device={name!r} is unknown", do=f"choose {near[0] if near else 'one of ' + ', '.join(_DEVICES)}"
        )
    return max(found, key=lambda device: len(_words(device.name)))


def _words(name: str) -> list[str]:
    return re.sub(r"(\d)\s+(?=GB\b)", r"\1", re.sub(r"[-_]", " ", name.upper())).split()


def find_link(name: str) -> Link:
    """Return the link within a machine with this name ("nvlink", "pcie4").

    Raises:
        ConfigError: the table has no such link.
    """
    if name not in _LINKS:
        raise ConfigError(f"link={name!r} is unknown", do=f"choose one of {', '.join(_LINKS)}")
    return _LINKS[name]


def find_network(name: str) -> Link:
    """Return the network with this name: "ethernet" (10 Gb/s), or the rate of a machine in Gb/s ("400Gb").

    Raises:
        ConfigError: it is neither.
    """
    if name == "ethernet":
        return _ETHERNET
    rate = _NETWORK.fullmatch(name.strip())
    if rate is None or not int(rate[1]):
        raise ConfigError(f"network={name!r} is unknown", do="give the rate of a machine, such as 400Gb, or 'ethernet'")
    return Link(int(rate[1]) * 1e9 / 8, 15e-6)


def hardware_of(cluster: Cluster) -> Hardware:
    """Return the hardware of ``cluster``; what it does not name is a common one (A100, its own links, 100 Gb/s).

    Raises:
        ConfigError: a name is in no table.
    """
    device = find_device(cluster.device or _DEFAULT_DEVICE)
    named = cluster.link or ("nvlink" if device.nvlink else "pcie4")
    link = find_link(named)
    if named == "nvlink" and device.nvlink:
        link = Link(device.nvlink, link.latency)
    return Hardware(
        device=device,
        link=link,
        network=find_network(cluster.network or "100Gb"),
        host=find_link("pcie4" if named == "nvlink" else named),
        is_known=bool(cluster.device),
    )


def build_cluster(
    *,
    gpus: int,
    nodes: int,
    device: str | None,
    gpu_memory: int | None,
    interconnect: str | None,
    host_memory: int | None = None,
    where: str,
    example: str,
) -> Cluster:
    """Return the machines; without ``gpu_memory``, a known device has what CUDA reports for it, another that of this machine's first one.

    Args:
        interconnect: names of a link and of a network, such as ``nvlink,400Gb``.
        where: what gives the memory, for an error.
        example: how it is given.

    Raises:
        ConfigError: the device or a link is unknown.
        UsageError: the memory is.
    """
    link, _comma, network = (interconnect or "").partition(",")
    if gpu_memory is None and device is not None:
        gpu_memory = find_device(device).memory
    elif gpu_memory is None and num_devices():
        gpu_memory = total_memory()
    if gpu_memory is None:
        raise UsageError(_("the memory of the devices is unknown"), where=where, do=example)
    cluster = Cluster(
        gpus_per_node=gpus,
        nodes=nodes,
        gpu_memory=gpu_memory,
        device=device or "",
        link=link,
        network=network,
        host_memory=host_memory,
    )
    hardware_of(cluster)  # checks the names
    return cluster
