"""Every setting from every source: which of two wins, that the loser is kept, and where each came from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from echelon import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.accelerator.plugins.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
)
from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.cli.launch import command
from echelon.cli.launch_options import flag_layer, typed_flags
from echelon.cli.main import cli
from echelon.config.derive import derive
from echelon.config.files import from_file
from echelon.config.key_table import BY_FIELD, KEYS, SECTIONS, USE, Key, own_variable
from echelon.config.origin import SettingSource
from echelon.config.resolve import Layer, Resolved, resolve
from echelon.config.schema import RunConfig, field_docs, field_names, field_types
from echelon.config.sources import CONFIG_VARIABLE, current, encode, from_code, from_environment, from_flags
from echelon.config.write import write
from echelon.launch.environment import rank_variables

SHARDED_BY = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED"}


def two_values(key: Key) -> tuple[Any, Any]:
    """Return two values of the field that differ from each other and from its default."""
    kinds = field_types(RunConfig)[key.field]
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        different = [choice for choice in choices if choice not in ("none", getattr(RunConfig(), key.field))]
        return different[0], different[1]
    if bool in kinds:
        return True, False
    if int in kinds:
        return 3, 4
    return (0.5, 2.0) if float in kinds else ("one", "two")


def by_file(key: Key, value: Any, folder: Path, *, kind: str = "yaml") -> tuple[Layer, str]:
    name = key.written
    if key.field == "sharded_by":
        name, value = "distributed_type", SHARDED_BY[value]
    settings = {name: value} if key.section is None else {key.section: {name: value}}
    path = folder / f"settings.{kind}"
    path.write_text(json.dumps(settings, indent=1))
    return from_file(path), f"file {path}:{2 if key.section is None else 3}"


def by_variable(key: Key, value: Any, variable: str) -> tuple[Layer, str]:
    if key.field == "sharded_by" and variable in USE:
        (variable,) = [name for name, kind in USE.items() if kind == value]
        value = True
    with environ.patch({variable: str(value)}):
        return from_environment(), f"env {variable}"


def by_flag(key: Key, value: Any, flag: str) -> tuple[Layer, str]:
    if key.field == "sharded_by":
        argv = [f"--use_{value}"]
    elif value is True and command_option(flag).is_flag:
        argv = [flag]
    else:
        argv = [flag, str(value)]
    layer = flags_of(*argv)
    return {name: setting for name, setting in layer.items() if name == key.field}, f"flag {argv[0]}"


def flags_of(*argv: str) -> Layer:
    """Parse a command line as ``echelon launch`` does, and run nothing."""
    with cli.make_context("echelon", ["launch"]) as top:
        with command.make_context("launch", [*argv, "train.py"], parent=top) as context:
            return flag_layer(context.params, typed_flags(context))


def command_option(flag: str) -> Any:
    return next(param for param in command.params if flag.replace("_", "-") in param.opts)


def by_code(key: Key, value: Any) -> tuple[Layer, str]:
    return from_code("Accelerator", {key.field: value}), f"code Accelerator({key.field}=)"


def sources(key: Key, folder: Path) -> list[tuple[SettingSource, Callable[[Any], tuple[Layer, str]]]]:
    """Return the places from which ``key`` can come."""
    found: list[tuple[SettingSource, Callable[[Any], tuple[Layer, str]]]] = [
        (SettingSource.FILE, lambda value: by_file(key, value, folder)),
        (SettingSource.FILE, lambda value: by_file(key, value, folder, kind="json")),
        (SettingSource.ENV, lambda value: by_variable(key, value, own_variable(key.field))),
        (SettingSource.CODE, lambda value: by_code(key, value)),
    ]
    foreign = next(iter(USE)) if key.field == "sharded_by" else key.variable
    if foreign is not None:
        found.append((SettingSource.ENV, lambda value: by_variable(key, value, foreign)))
    flags = [flag for flag in key.flags if flag.startswith("--")] or (["--use-"] if key.field == "sharded_by" else [])
    for flag in flags:
        spelt = f"--{flag[2:].replace('-', '_')}"
        found.append((SettingSource.FLAG, lambda value, spelt=spelt: by_flag(key, value, spelt)))
    return found


def test_the_table_has_every_field_once_and_each_says_what_it_means() -> None:
    assert sorted(key.field for key in KEYS) == sorted(field_names(RunConfig))
    assert field_docs(RunConfig).keys() == set(field_names(RunConfig))
    for names in (
        [key.variable for key in KEYS if key.variable],
        [flag for key in KEYS for flag in key.flags],
        [(key.section, name) for key in KEYS for name in (key.written, *key.names)],
    ):
        repeated = [name for name in names if names.count(name) > 1]
        assert not repeated or {name[1] for name in repeated} == {"use_cpu"}


@pytest.mark.sample(9)
@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.field)
def test_of_two_sources_the_stronger_wins_and_both_are_named(key: Key, tmp_path: Path) -> None:
    values = two_values(key)
    # A switch can only be switched on: by a flag, True is the only value of those.
    is_switch = any(command_option(flag).is_flag for flag in key.flags)
    given = [
        (
            source,
            [give(value) if value or source is not SettingSource.FLAG or not is_switch else None for value in values],
        )
        for source, give in sources(key, tmp_path)
    ]
    for (weak, by_weak), (strong, by_strong) in itertools.permutations(given, 2):
        if weak >= strong:
            continue
        lower, upper = (0, 1) if strong is not SettingSource.FLAG else (1, 0)
        assert by_weak[lower] is not None
        assert by_strong[upper] is not None
        (lost, lost_at), (won, won_at) = by_weak[lower], by_strong[upper]
        loser, winner = values[lower], values[upper]
        for layers in ([lost, won], [won, lost]):
            resolved = resolve(RunConfig, layers)
            assert getattr(resolved.value, key.field) == winner
            assert str(resolved.origins[key.field]).startswith(won_at)
            (shadowed,) = resolved.shadowed
            assert (shadowed.name, shadowed.value) == (key.field, loser)
            assert str(shadowed.origin).startswith(lost_at)
            with pytest.raises(ConfigError, match=f"{key.field} is set twice"):
                resolve(RunConfig, layers, strict=True)


@pytest.mark.sample(9)
@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.field)
def test_a_setting_arrives_on_a_rank_with_its_origin(key: Key, tmp_path: Path) -> None:
    value = two_values(key)[0]
    by_toml = tmp_path / "run.toml"
    write(by_toml, {key.field: value})
    files = [(from_file(by_toml), f"file {by_toml}:"), by_file(key, value, tmp_path)]
    flags = [give(value) for source, give in sources(key, tmp_path) if source is SettingSource.FLAG]
    for layer, place in [*files, *flags]:
        rank = on_a_rank(layer)
        assert getattr(rank.value, key.field) == value
        assert str(rank.origins[key.field]).startswith(place)
        assert rank.shadowed == ()
    for variable in variables_of(key, value):
        text = str(True if variable in USE else value)
        for rank in (on_a_rank({}, {variable: text}), of_a_process({variable: text})):
            assert getattr(rank.value, key.field) == value
            assert str(rank.origins[key.field]) == f"env {variable}"
            assert rank.shadowed == ()


def on_a_rank(layer: Layer, users: Mapping[str, str] = MappingProxyType({})) -> Resolved[RunConfig]:
    """Return the settings on a rank that the launcher started with ``layer`` and the user's variables ``users``."""
    with environ.patch(users):
        resolved = derive(resolve(RunConfig, [layer, from_environment()]))
        with environ.patch(rank_variables(resolved, num_processes=1, num_threads=None, has_accelerator=False)):
            return current()


def of_a_process(users: Mapping[str, str]) -> Resolved[RunConfig]:
    """Return the settings of a process that was started without the launcher."""
    with environ.patch(users):
        return current()


def variables_of(key: Key, value: Any) -> list[str]:
    theirs = [name for name, kind in USE.items() if key.field == "sharded_by" and kind == value]
    return [own_variable(key.field), *theirs, *([key.variable] if key.variable else [])]


@pytest.mark.parametrize(
    ("plugin", "given", "text"),
    [
        (FullyShardedDataParallelPlugin, {"fsdp_activation_checkpointing_offload": True}, "has no effect without"),
        (FullyShardedDataParallelPlugin, {"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "is not supported"),
        (FullyShardedDataParallelPlugin, {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "requires a size"),
        (DeepSpeedPlugin, {"fp8_backend": "MSAMP"}, "MS-AMP is not supported"),
        (ParallelismConfig, {"parallelism_config_cp_backend": "ring"}, "cp_backend='ring' is unknown"),
        (TorchContextParallelConfig, {"parallelism_config_cp_comm_strategy": "ring"}, "is unknown"),
        (DeepSpeedSequenceParallelConfig, {"parallelism_config_sp_attn_implementation": "eager"}, "is not supported"),
        (
            DeepSpeedSequenceParallelConfig,
            {"parallelism_config_sp_seq_length_is_variable": False},
            "needs sp_seq_length",
        ),
    ],
)
def test_a_plugin_names_the_source_of_a_setting_that_it_refuses(
    plugin: type, given: dict[str, Any], text: str, tmp_path: Path
) -> None:
    ((name, value),) = given.items()
    key = BY_FIELD[name]
    for layer, place in (
        by_file(key, value, tmp_path),
        by_variable(key, value, str(key.variable)),
        flag_of(key, value),
    ):
        resolved = resolve(RunConfig, [layer])
        with (
            environ.patch(rank_variables(resolved, num_processes=1, num_threads=None, has_accelerator=False)),
            pytest.raises(ConfigError, match=text) as raised,
        ):
            plugin()
        assert str(raised.value.where).startswith(place)


def flag_of(key: Key, value: Any) -> tuple[Layer, str]:
    return from_flags({key.field: (value, key.flags[0])}), f"flag {key.flags[0]}"


def test_a_plugin_has_the_settings_of_the_launcher_and_its_own_arguments_win() -> None:
    given = {"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_activation_checkpointing": True}
    layer = from_flags({name: (value, f"--{name}") for name, value in given.items()})
    # Without accelerate's variables: nothing reads them a second time.
    with environ.patch({CONFIG_VARIABLE: encode(resolve(RunConfig, [layer]))}):
        plugin = FullyShardedDataParallelPlugin(activation_checkpointing=False)
    assert (plugin.fsdp_version, plugin.activation_checkpointing) == (2, False)
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def test_a_variable_that_the_program_changes_overrides_the_flag_that_the_launcher_wrote_there() -> None:
    resolved = resolve(RunConfig, [from_flags({"fsdp_offload_params": (True, "--fsdp-offload-params")})])
    launched = derive(replace(resolved, value=replace(resolved.value, sharded_by="fsdp")))
    with environ.patch(rank_variables(launched, num_processes=1, num_threads=None, has_accelerator=False)):
        assert str(current().origins["fsdp_offload_params"]) == "flag --fsdp-offload-params"
        with environ.patch({"FSDP_OFFLOAD_PARAMS": "false"}):
            rank = current()
            assert rank.value.fsdp_offload_params is False
            assert str(rank.origins["fsdp_offload_params"]) == "code os.environ['FSDP_OFFLOAD_PARAMS']"
        # The user's own variable, which lost to the flag when the run was launched.
        with environ.patch({"ECHELON_FSDP_OFFLOAD_PARAMS": "false"}):
            assert current().value.fsdp_offload_params is True


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.field)
def test_text_and_value_are_the_same_and_the_own_variable_wins(key: Key) -> None:
    value, other = two_values(key)
    for text in {str(value), str(value).lower() if not isinstance(value, str) else value}:
        layers = [by_variable(key, text, own_variable(key.field))[0], by_code(key, value)[0]]
        assert getattr(resolve(RunConfig, layers, strict=True).value, key.field) == value
    if key.variable is not None:
        with environ.patch({key.variable: str(other), own_variable(key.field): str(value)}):
            assert getattr(resolve(RunConfig, [from_environment()]).value, key.field) == value


def test_names_in_a_section_may_leave_its_prefix_out_and_the_section_its_end(tmp_path: Path) -> None:
    for section, prefix in SECTIONS.items():
        for key in [key for key in KEYS if key.section == section and key.field.startswith(prefix)]:
            value = two_values(key)[0]
            short = {section.removesuffix("_config"): {key.field.removeprefix(prefix): value}}
            path = tmp_path / "settings.yaml"
            path.write_text(json.dumps(short))
            assert [*from_file(path)] == [key.field]


def test_two_flags_that_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="--use_fsdp and --use_deepspeed are mutually exclusive"):
        flags_of("--use_fsdp", "--use_deepspeed")
    both = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "1"}
    with (
        environ.patch(both),
        pytest.raises(ConfigError, match="ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED are both"),
    ):
        from_environment()
    with environ.patch({**both, "ACCELERATE_USE_FSDP": "false"}):
        assert from_environment()["sharded_by"].value == "deepspeed"


def test_a_json_of_deepspeed_by_flag_means_deepspeed() -> None:
    layer = flags_of("--deepspeed", "ds.json")
    assert {name: setting.value for name, setting in layer.items()} == {
        "deepspeed_config_file": "ds.json",
        "sharded_by": "deepspeed",
    }
    assert str(layer["deepspeed_config_file"].origin) == "flag --deepspeed"


def test_the_fields_of_a_launcher_are_those_of_accelerate() -> None:
    assert BY_FIELD["cpu"].written == "use_cpu"
    assert flags_of("--num_gpus", "2")["num_processes"].value == "2"
    assert flags_of("--nnodes", "1:4")["num_machines"].value == "4"
