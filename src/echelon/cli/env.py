"""``echelon env``: prints the system information that a bug report needs, without secrets, user names or host names.

``torch.utils.collect_env`` takes seconds (``pip list``, compilers) and does not show control groups, network interfaces or
settings.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from subprocess import CalledProcessError
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import click

from echelon._version import __version__
from echelon.base.cores import usable_cores
from echelon.base.device import accelerators, nccl_version
from echelon.base.errors import ConfigError, UsageError
from echelon.base.limits import group_folders, text_of
from echelon.base.messages.terminal import align_columns
from echelon.base.messages.translation import gettext as _, gettext_noop as N_, in_english
from echelon.base.optional import install_command, is_available
from echelon.compat.machine import convert_bytes, get_driver_version
from echelon.config.derive import derive
from echelon.config.files import find_config_file, from_file
from echelon.config.library_variables import replaced_libraries
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunConfig, field_names, field_types
from echelon.config.sources import from_environment
from echelon.launch.environment import inherited
from echelon.status.run_facts import installed_versions, processor_name
from echelon.world.environment import detect
from echelon.world.launch_variables import schedulers_and_notebooks

Facts = dict[str, str]

# Shown in addition to the packages that echelon and its extras require.
_PACKAGES = (
    "accelerate",
    "transformers",
    "datasets",
    "trl",
    "peft",
    "sentence-transformers",
    "setfit",
    "diffusers",
    "lightning",
    "pytorch-lightning",
    "torchvision",
    "triton",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu12",
)
_PREFIX = re.compile(
    "(ECHELON|ACCELERATE|FSDP|PARALLELISM_CONFIG|DEEPSPEED|DS|PYTORCH|TORCH|TORCHELASTIC|TORCHINDUCTOR|NCCL|RCCL|UCC|UCX|FI|GLOO|"
    "SLURM|OMPI|PMI|PMIX|KUBERNETES|CUDA|HIP|ROCR|HSA|XLA|OMP|MKL|KMP|GOMP)_"
)
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
_NAMES = frozenset({*_RANKS, "MASTER_ADDR", "MASTER_PORT"})
_NUMBERS = re.compile(r"[\d,]{1,64}")
_LEVEL = re.compile("off|version|debug|info|detail|trace|warn|warning|error|critical|abort", re.IGNORECASE)
# Variables whose values are shown if they have the expected form, which a secret pasted by mistake would not have.
_SHOWN = MappingProxyType(
    {
        **dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), _NUMBERS
        ),
        **dict.fromkeys(_RANKS, _NUMBERS),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"), _NUMBERS),
        **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"), _NUMBERS),
        **dict.fromkeys(("NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "GLOO_LOG_LEVEL", "ECHELON_LOG_LEVEL"), _LEVEL),
    }
)
# Linux hardware type numbers (if_arp.h).
_KINDS = MappingProxyType(
    {1: "ethernet", 32: "infiniband", 512: "ppp", 768: "tunnel", 772: "loopback", 65534: "point to point"}
)


@click.command("env")
@click.option("--config-file", metavar="FILE", help="Config file (default: the file that the launcher would use).")
@click.option("--addresses", is_flag=True, help="Also show the network addresses, and the hosts and paths in settings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(config_file: str | None, addresses: bool, as_json: bool) -> None:
    """Show the versions, hardware, network and settings for a bug report.

    The output contains no secrets: most environment variables appear without their values, free-text settings and user and
    host names are omitted, and paths do not show the home folder.
    """
    report: dict[str, Any] = {
        N_("versions"): versions(),
        N_("system"): system(),
        N_("devices"): _devices(),
        N_("network"): _interfaces(with_addresses=addresses),
        N_("started by"): ", ".join(_starters()) or _("no known launcher"),
        N_("libraries that echelon replaces"): _stands_in_for(),
        N_("settings"): _settings_of(config_file, with_addresses=addresses),
        N_("variables"): _variables(),
    }
    if as_json:
        click.echo(json.dumps(in_english(report), indent=2))
        return
    for title, facts in report.items():
        words = facts if isinstance(facts, str) else "" if facts else _("none")
        click.echo(_("{title}: {words}", title=_(title), words=words).rstrip())
        if isinstance(facts, dict) and facts:
            for line in align_columns([(_(name), value) for name, value in facts.items()]):
                click.echo(f"  {line}")


def _settings_of(config_file: str | None, *, with_addresses: bool) -> dict[str, str] | str:
    path = config_file or find_config_file()
    try:
        layers = [from_environment(), *([from_file(path)] if path else [])]
        resolved = derive(resolve(RunConfig, layers))
    except ConfigError as error:
        # The message may quote the value.
        return without_home(_("invalid ({where}); run echelon config explain for details", where=error.where))
    found = _settings(resolved, with_addresses=with_addresses)
    return {N_("file"): without_home(str(path)), **found} if path else found


def versions() -> Facts:
    """Return the versions of Python, echelon, and the packages that echelon uses."""
    build = " ".join([platform.python_implementation(), *platform.python_build(), platform.python_compiler()])
    return {
        "echelon": __version__,
        "python": f"{platform.python_version()} ({build})",
        N_("executable"): without_home(sys.executable)
        + (_(" (virtual environment)") if sys.prefix != sys.base_prefix else ""),
        **installed_versions(_packages()),
    }


def _packages() -> Sequence[str]:
    """Return the packages required by echelon and its extras, except ``dev``."""
    try:
        requirements = metadata.requires("echelon-train") or []
    except metadata.PackageNotFoundError:  # run from a source tree
        requirements = ["torch", "numpy", "safetensors"]
    names = [
        match[0]
        for text in requirements
        if not re.search(r"extra == .dev", text) and (match := re.match(r"[\w.-]+", text))
    ]
    return list(dict.fromkeys([*names, *_PACKAGES]))


def _stands_in_for() -> str:
    """Return which libraries echelon replaces in runs started from this environment, as set by ``ECHELON_AS``."""
    text = replaced_libraries()
    if text is None:
        return _("none (echelon launch --as and echelon.compat.install replace accelerate and transformers' Trainer)")
    from echelon.ecosystem import swap  # noqa: PLC0415 - not loaded without the swap

    try:
        libraries = swap.parse_libraries(text.split(","), where=_("env {name}", name=swap.VARIABLE))
    except UsageError:
        return _("invalid (env {name})", name=swap.VARIABLE)  # the value may be a secret
    return f"{swap.describe(libraries).removeprefix('stands in for ')} (env {swap.VARIABLE})"


def system(root: Path = Path("/")) -> Facts:
    """Return the operating system, the CPU, and the resources available to a process."""
    found = {N_("system"): _system_name(), N_("kernel"): f"{platform.release()} {platform.machine()}"}
    if any(libc := platform.libc_ver()):
        found["libc"] = " ".join(libc)
    found["cpu"] = processor_name(root)
    found[N_("cores")] = _("{number}, {num_usable} usable", number=os.cpu_count(), num_usable=usable_cores(root))
    memory = _memory(root)
    if memory:
        found[N_("memory")] = memory
    limits = {
        name: text
        for name in ("memory.max", "memory.high", "cpu.max", "pids.max")
        if (text := _group_limit(root, name))
    }
    if limits:
        found[N_("cgroup limits")] = ", ".join(f"{name} {text}" for name, text in limits.items())
    for place in ("dev/shm", "tmp"):
        if (root / place).is_dir():
            space = os.statvfs(root / place)
            sizes = (convert_bytes(space.f_frsize * blocks) for blocks in (space.f_blocks, space.f_bavail))
            found[f"/{place}"] = _("{size}, {free} free", size=next(sizes), free=next(sizes))
    if (open_files := _open_files()) is not None:
        found[N_("open files")] = open_files
    return found


def _system_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not Linux
        return f"{platform.system()} {platform.mac_ver()[0]}".strip()


def _memory(root: Path) -> str:
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text_of(root / "proc/meminfo"), re.MULTILINE))
    sizes = [convert_bytes(int(found[name]) * 1024) for name in ("MemTotal", "MemAvailable") if name in found]
    return _("{size}, {free} available", size=sizes[0], free=sizes[1]) if len(sizes) == 2 else "".join(sizes)


def _group_limit(root: Path, name: str) -> str:
    """Return the lowest limit set by this process's control groups (cgroup v2 only), or an empty string if none is set."""
    folders = (folder for folder, version in group_folders("", root) if version == 2)
    limits = [text for folder in folders if (text := text_of(folder / name).strip()) and not text.startswith("max")]
    return min(limits, key=lambda text: int(text.split()[0]), default="")


def _open_files() -> str | None:
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - not available on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _("{soft} (hard limit {hard})", soft=soft, hard=hard)


def _devices() -> Facts:
    """Return the accelerators, the backends, and torch's build settings."""
    if not is_available("torch"):
        return {"accelerators": f"unknown, because torch is not installed: {install_command('torch')}"}
    import torch  # noqa: PLC0415 - `echelon env --help` does not need it

    backends = [name for name in ("nccl", "gloo", "mpi", "ucc", "xccl") if torch.distributed.is_backend_available(name)]
    built = re.search(r"Build settings: (.*)", torch.__config__.show())
    built_with = [part for part in built[1].split(", ") if "_FLAGS=" not in part and "/" not in part] if built else []
    found = {
        N_("accelerators"): "; ".join(accelerators()) or _("none"),
        N_("driver"): _driver(),
        "CUDA": torch.version.cuda or "",
        "ROCm": torch.version.hip or "",
        "NCCL": nccl_version() or "",
        N_("backends"): ", ".join(backends),
        N_("cpu threads"): str(torch.get_num_threads()),
        N_("cpu capability"): torch.backends.cpu.get_cpu_capability(),
        N_("torch built with"): ", ".join(built_with).strip(", "),
    }
    return {name: value for name, value in found.items() if value}


def _driver() -> str:
    try:
        return get_driver_version()
    except (OSError, CalledProcessError, IndexError):  # no NVIDIA GPU
        return ""


def _interfaces(*, with_addresses: bool = False, root: Path = Path("/")) -> Facts:
    """Return each network interface's kind, state, speed and address classes (loopback, link-local, private, public)."""
    import psutil  # noqa: PLC0415 - `echelon env --help` does not need it

    found = {}
    for name, entries in psutil.net_if_addrs().items():
        folder = root / "sys/class/net" / name
        number = text_of(folder / "type").strip()
        words = [
            _KINDS.get(int(number), f"kind {number}") if number else "",
            *(word for word in ("wireless", "bridge", "bonding", "tun_flags") if (folder / word).exists()),
            text_of(folder / "operstate").strip(),
        ]
        speed = _speed(folder)
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = ipaddress.ip_address(entry.address.partition("%")[0])
                words.append(_class_of(address) + (f" {address}" if with_addresses else ""))
        found[name] = ", ".join(dict.fromkeys(word for word in [*words, speed] if word))
    return found


def _speed(folder: Path) -> str:
    text = text_of(folder / "speed").strip()  # Mbit/s; -1 or empty if unknown
    return f"{int(text) / 1000:g} Gbit/s" if text.isdigit() else ""


def _class_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    kind = next(
        (word for word in ("loopback", "link_local", "private") if getattr(address, f"is_{word}")), "public"
    ).replace("_", "-")
    return f"IPv{address.version} {kind}"


def _variables() -> Facts:
    """Return the environment variables that affect a run. Only certain numbers and log levels appear with their values."""
    found = {}
    for name, value in sorted(inherited().items()):
        if _PREFIX.match(name) or name in _NAMES:
            pattern = _SHOWN.get(name)
            found[name] = value if pattern is not None and pattern.fullmatch(value) else "(set)" if value else "(empty)"
    return found


def _starters() -> list[str]:
    """Return the launchers, schedulers and notebooks detected in this process's environment."""
    found = []
    try:
        starter = detect().starter
    except ConfigError as error:  # its message may contain the value of a variable
        found.append(f"contradictory variables ({error.where})")
    else:
        found += [] if starter == "single" else [starter]
    return list(dict.fromkeys([*found, *schedulers_and_notebooks()]))


def _settings(resolved: Resolved[RunConfig], *, with_addresses: bool = False) -> Facts:
    """Return the non-default settings with their origins, without free text (paths, hosts, addresses)."""
    types, found = field_types(RunConfig), {}
    for name in field_names(RunConfig):
        value, origin = getattr(resolved.value, name), resolved.origins[name]
        if origin.source is SettingSource.DEFAULT:
            continue
        is_closed = not isinstance(value, str) or value in _choices(types[name])
        shown = repr(value) if is_closed or with_addresses else "(text)"
        found[name] = without_home(f"{shown}  ({origin})")
    return found


def _choices(kinds: Sequence[object]) -> set[object]:
    return {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}


def without_home(text: str) -> str:
    """Replace this user's home folder in ``text`` with ``~``, and the user name in other paths with ``USER``."""
    homes = {str(Path.home()), str(Path.home().resolve())} - {"/"}
    for home in sorted(homes, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w.-])", "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user id may have no name
        return text
    return re.sub(rf"(?<=/){re.escape(user)}(?=/|$)", "USER", text)
