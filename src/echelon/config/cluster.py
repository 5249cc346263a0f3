"""``ClusterConfig`` and ``load_config_from_file``, for scripts that read config files under accelerate's names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.config.derive import derive
from echelon.config.files import find_config_file, from_file
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.config.write import chosen, for_accelerate, write_mapping


@dataclass
class ClusterConfig:
    """A config file's settings under accelerate's names. Each section is a dict, which is empty if the file lacks the section."""

    compute_environment: str
    distributed_type: str
    mixed_precision: str
    use_cpu: bool
    debug: bool
    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_config") and getattr(self, field.name) is None:
                setattr(self, field.name, {})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict, without None values and empty sections."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != {}}

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write the settings to a YAML file."""
        write_mapping(Path(yaml_file), self.to_dict(), suffix=".yaml")

    def to_json_file(self, json_file: str | Path) -> None:
        """Write the settings to a JSON file."""
        write_mapping(Path(json_file), self.to_dict(), suffix=".json")

    @classmethod
    def from_yaml_file(cls, yaml_file: str | Path | None = None) -> ClusterConfig:
        """Read a config file; None selects the file that the launcher would use."""
        return load_config_from_file(yaml_file)

    @classmethod
    def from_json_file(cls, json_file: str | Path | None = None) -> ClusterConfig:
        """Read a config file; None selects the file that the launcher would use."""
        return load_config_from_file(json_file)


def load_config_from_file(config_file: str | Path | None) -> ClusterConfig:
    """Return the settings in ``config_file``, which may have any format that the launcher supports.

    If ``config_file`` is None, the file that the launcher would use is read. Settings that do not exist in accelerate, such
    as ``engine`` and ``parity``, are omitted.

    Raises:
        ConfigError: no file exists, or it contains an unsupported setting.

    Source: accelerate.commands.config.load_config_from_file.
    """
    path = config_file if config_file is not None else find_config_file()
    if path is None:
        raise ConfigError(_("no config file found"), do=_("pass a path, or run echelon config to create a file"))
    values = chosen(derive(resolve(RunConfig, [from_file(path)])))
    known = {field.name for field in fields(ClusterConfig)}
    return ClusterConfig(**{name: value for name, value in for_accelerate(values).items() if name in known})
