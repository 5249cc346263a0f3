"""Finds config files, and converts one (echelon's, accelerate's, or a DeepSpeed JSON file) to a layer of settings."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.compat.unsupported import TPU_ALTERNATIVE
from echelon.config.documents import DocumentEntry, read
from echelon.config.key_table import BY_FIELD, KEYS, SECTIONS
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import Layer

PROJECT_FILE = "echelon.toml"

# accelerate's `distributed_type` -> the field that it sets, or None.
_ON_ACCELERATORS = tuple(f"MULTI_{device}" for device in ("GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON"))
_TYPES = MappingProxyType(
    {
        "FSDP": ("sharded_by", "fsdp"),
        "DEEPSPEED": ("sharded_by", "deepspeed"),
        "MULTI_CPU": ("cpu", True),
        "NO": None,
        "MPS": None,
        **dict.fromkeys(_ON_ACCELERATORS),
    }
)
_MEGATRON = "set distributed_type: FSDP or DEEPSPEED to shard the model"
_MPI = "remove it, and start the script directly with mpirun; echelon detects the ranks"
_SAGEMAKER = "run echelon launch inside the instance that SageMaker starts"
# accelerate's names that set no field. Those in _SILENT only concern TPUs and are ignored. The names in _REFUSED raise an error
# with this advice, unless their value is empty, false or "no".
_SILENT = frozenset({"main_training_function", "use_mps_device", "use_xpu"})
_REFUSED = MappingProxyType(
    {
        **dict.fromkeys(
            ("tpu_use_cluster", "tpu_use_sudo", "tpu_name", "tpu_zone", "tpu_vm", "tpu_env"), TPU_ALTERNATIVE
        ),
        **dict.fromkeys(("commands", "command_file", "downcast_bf16"), TPU_ALTERNATIVE),
        "megatron_lm_config": _MEGATRON,
        "mpirun_config": _MPI,
        "ipex_config": "remove it; these optimizations are built into PyTorch",
        "use_megatron_lm": _MEGATRON,
        **dict.fromkeys(
            ("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name"), _SAGEMAKER
        ),
        **dict.fromkeys(("pytorch_version", "transformers_version", "py_version"), _SAGEMAKER),
        **dict.fromkeys(("sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"), _SAGEMAKER),
    }
)
_OTHER_FP8 = frozenset(
    f"fp8_{name}"
    for name in (
        *("margin", "interval", "format", "amax_history_length", "amax_history_len", "amax_compute_algorithm"),
        *("amax_compute_algo", "override_linear_precision", "use_autocast_during_eval"),
        *("optimization_level", "opt_level"),
    )
)
_FIRST = (
    "compute_environment",
    "distributed_type",
)  # checked first: they explain the other unsupported settings of a file
# Top-level names that only DeepSpeed's files contain.
_DEEPSPEED = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print"})


def own_file() -> Path:
    """Return the path of this user's echelon config file."""
    home = environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "echelon" / "default_config.toml"


def find_config_file() -> Path | None:
    """Return the project's config file, else the user's echelon file, else accelerate's; None if none of them exists."""
    own, theirs = own_file(), _accelerate_file()
    candidates = (
        Path(PROJECT_FILE),
        *(own.with_suffix(suffix) for suffix in (".toml", ".yaml", ".json")),
        *(theirs.with_suffix(suffix) for suffix in (".yaml", ".json")),
    )
    return next((path for path in candidates if path.is_file()), None)


def from_file(path: str | Path) -> Layer:
    """Return a layer with a file's settings and their line numbers.

    The file is YAML, JSON or TOML and uses echelon's or accelerate's names. The path of a DeepSpeed JSON file becomes the
    value of ``deepspeed_config_file``.

    Raises:
        ConfigError: the file cannot be read, or contains an unknown or unsupported setting.
    """
    entries = read(path)
    if Path(path).suffix == ".json" and _DEEPSPEED & {entry.keys[0] for entry in entries}:
        origin = Origin(SettingSource.FILE, str(path))
        return {"deepspeed_config_file": Setting(str(path), origin), "sharded_by": Setting("deepspeed", origin)}
    layer: dict[str, Setting] = {}
    for entry in sorted(entries, key=lambda entry: entry.keys[0] not in _FIRST):
        if entry.value is not None and not (entry.value == {} and _section(entry.keys[0]) is not None):
            _add(layer, entry)
    return layer


def find_accelerator_request(path: str | Path) -> Setting | None:
    """Return a file's ``distributed_type`` if it requests accelerators (for example ``MULTI_GPU``), else None.

    ``use_cpu: false`` does not count as a request, because accelerate writes it on every machine. Neither does a file without
        ``num_processes``: accelerate always writes this setting, but ``echelon config`` writes it only if the user gave it.

    Raises:
        ConfigError: the file cannot be read.
    """
    entries = {entry.keys: entry for entry in read(path)}
    kind = entries.get(("distributed_type",))
    if kind is None or str(kind.value).upper() not in _ON_ACCELERATORS or ("num_processes",) not in entries:
        return None
    return Setting(kind.value, Origin(SettingSource.FILE, kind.place))


def _accelerate_file() -> Path:
    """Return the path of the file that ``accelerate config`` writes."""
    home = environ.get("HF_HOME")
    if home is None:
        home = f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def _add(layer: dict[str, Setting], entry: DocumentEntry) -> None:
    origin = Origin(SettingSource.FILE, entry.place)
    first, value = entry.keys[0], entry.value
    if first in _REFUSED or first in _SILENT:
        _refuse(entry)
    elif first == "compute_environment":
        if str(value) not in ("LOCAL_MACHINE", "0"):
            raise _unsupported(entry, do=_SAGEMAKER)
    elif first == "distributed_type":
        known = "NO" if value is False else str(value).upper()  # YAML reads an unquoted NO as false
        if known not in _TYPES:
            do = TPU_ALTERNATIVE if known in ("TPU", "XLA") else _MEGATRON if known == "MEGATRON_LM" else None
            raise _unsupported(entry, do=do or _("use one of {types}", types=", ".join(_TYPES)))
        if (sets := _TYPES[known]) is not None:
            layer.setdefault(
                sets[0], Setting(sets[1], Origin(SettingSource.FILE, f"{entry.place} (distributed_type: {value})"))
            )
    elif first == "fp16" and len(entry.keys) == 1:  # the predecessor of mixed_precision
        origin = Origin(SettingSource.FILE, f"{entry.place} (fp16: {value})")
        layer.setdefault("mixed_precision", Setting("fp16" if value else "no", origin))
    elif (field := _field(entry)) is not None and not _is_default(field, value):
        if isinstance(value, (list, tuple)):
            value = ",".join(str(part) for part in value)
        layer[field] = Setting(value, origin)


def _refuse(entry: DocumentEntry) -> None:
    do = _REFUSED.get(entry.keys[0])
    if entry.keys[-1] == "mpirun_ccl":  # has no effect without mpirun's hostfile
        return
    is_set = str(entry.value).strip("[]' ").lower() not in ("", "no", "none", "false", "0", "{}")
    if is_set and do is not None:
        raise _unsupported(entry, do=do)


def _field(entry: DocumentEntry) -> str | None:
    """Return the field that an entry sets, or None if the entry configures an unsupported fp8 library."""
    section, name = _section(entry.keys[0]), entry.keys[-1]
    if len(entry.keys) > (1 if section is None else 2):
        raise _unknown(entry, ())
    if section is None or len(entry.keys) == 1:
        names = {other: key.field for key in KEYS for other in (key.field, *key.names)}
        if name in names:
            return names[name]
        raise _unknown(entry, [*names, *SECTIONS, *_FIRST, *_SILENT, *_REFUSED])
    prefix = SECTIONS[section]
    names = {other: key.field for key in KEYS if key.section == section for other in (key.field, *key.names)}
    # Unlike in accelerate, a name sets a field of its own section only.
    for candidate in (name, prefix + name):
        if candidate in names:
            return names[candidate]
    if section == "fp8_config" and {name, prefix + name} & _OTHER_FP8:
        return None  # the error about fp8_backend covers it
    raise _unknown(entry, names)


def _section(name: str) -> str | None:
    for candidate in (name, f"{name}_config"):
        if candidate in SECTIONS:
            return candidate
    return None


def _is_default(field: str, value: Any) -> bool:
    """Return whether this is the value that accelerate writes for a setting that the user did not choose."""
    return (field == "num_processes" and value == -1) or (field == "gpu_ids" and str(value).lower() in ("all", ""))


def _unsupported(entry: DocumentEntry, *, do: str) -> ConfigError:
    return ConfigError(
        _("{keys}: {value} is not supported by echelon", keys=".".join(entry.keys), value=entry.value),
        where=_("file {name}", name=entry.place),
        do=do,
    )


def _unknown(entry: DocumentEntry, names: Any) -> ConfigError:
    known = [name for name in names if name not in _REFUSED] if len(entry.keys) == 1 else list(names)
    near = get_close_matches(entry.keys[-1], known, n=1)
    if not near and len(entry.keys) > 1:  # a known name in the wrong section
        near = [f"{BY_FIELD[name].section or 'top level'}: {name}" for name in BY_FIELD if name == entry.keys[-1]]
    return ConfigError(
        _("unknown setting {keys!r}", keys=".".join(entry.keys)),
        where=_("file {name}", name=entry.place),
        do=_("did you mean {near!r}?", near=near[0]) if near else _("echelon config explain lists all settings"),
    )
