"""``echelon to-fsdp2``: converts the FSDP settings of a config file of accelerate from version 1 to version 2."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.terminal import say
from echelon.base.messages.translation import gettext as _
from echelon.cli.help.completion import complete_paths

_WITHOUT_MEANING = (
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
)
_RESHARDS = MappingProxyType(
    {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False, "NO_SHARD": False}
)
_NUMBERED = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)  # 1, 2, ... of older files


@click.command("to-fsdp2")
@click.option(
    "--config-file",
    metavar="FILE",
    required=True,
    shell_complete=complete_paths,
    help="accelerate's config file to convert.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output file, or without one the config file itself.")
@click.option("--output-file", metavar="FILE", shell_complete=complete_paths, help="File to write.")
def command(config_file: str, overwrite: bool, output_file: str | None) -> None:
    """Convert the FSDP settings in a config file of accelerate from version 1 to version 2, with accelerate's options."""
    import yaml  # noqa: PLC0415 - takes 20 ms, which --help does not need

    source, target = Path(config_file), Path(output_file or config_file)
    if not source.is_file():
        raise UsageError(
            _("{path} is not a file", path=source),
            where="--config_file",
            do=_("pass a YAML file that accelerate reads"),
        )
    if not overwrite and (output_file is None or target.exists()):
        raise UsageError(
            _("{path} would be overwritten", path=target),
            where="--output_file",
            do=_("pass --output_file with a new file, or --overwrite"),
        )
    try:
        config = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            _("{path} is not YAML: {error}", path=source, error=error), do=_("pass a YAML file that accelerate reads")
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("fsdp_config"), dict):
        raise ConfigError(
            _("{path} has no fsdp_config", path=source), do=_("pass a config file of accelerate that uses FSDP")
        )
    converted, notes = convert(config["fsdp_config"])
    for note in notes:
        say(note)
    target.write_text(yaml.safe_dump({**config, "fsdp_config": converted}), encoding="utf-8")
    click.echo(_("wrote {path}", path=target))


def convert(settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the ``fsdp_*`` settings with the names and values of version 2, and what is lost.

    Source: accelerate's ``to-fsdp2`` (accelerate.commands.to_fsdp2).
    """
    if str(settings.get("fsdp_version", 1)) == "2":
        return settings, [_("the settings are already those of version 2; set fsdp_version to 1 if the names are old")]
    found: dict[str, Any] = {}
    notes = []
    for name, value in settings.items():
        if name in _WITHOUT_MEANING:
            notes.append(_("{name} has no meaning in version 2, and was removed", name=name))
        elif name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
            text = str(value)
            is_number = name == "fsdp_sharding_strategy" and text in ("1", "2", "3", "4", "5")
            strategy = _NUMBERED[int(text) - 1] if is_number else text
            if name == "fsdp_sharding_strategy" and strategy == "NO_SHARD":
                notes.append(
                    _("NO_SHARD does not exist in version 2: the parameters are sharded now; use DDP not to shard")
                )
            if name == "fsdp_sharding_strategy" and strategy.startswith("HYBRID"):
                notes.append(
                    _(
                        "{strategy} does not exist in version 2: set parallelism_config_dp_replicate_size to the number of machines",
                        strategy=strategy,
                    )
                )
            if name == "fsdp_sharding_strategy" or "fsdp_reshard_after_forward" not in found:
                found["fsdp_reshard_after_forward"] = _RESHARDS.get(strategy, value)
        else:
            found[name] = value
    return {**found, "fsdp_version": 2}, notes
