"""resolve: code > flag > environment > file > default, each value with its origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.config.explain import show
from echelon.config.files import from_file
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig, field_names
from echelon.config.sources import (
    current,
    decode,
    encode,
    from_flags,
    is_debug,
    set_debug,
)


def _layer(name: str, value: object, source: SettingSource) -> dict[str, Setting]:
    return {name: Setting(value, Origin(source, f"from-{source.name}"))}


def test_an_unset_setting_has_its_default() -> None:
    resolved = resolve(RunConfig, [])
    assert resolved.value == RunConfig()
    assert {origin.source for origin in resolved.origins.values()} == {SettingSource.DEFAULT}


@pytest.mark.parametrize(
    ("name", "value", "texts"),
    [
        ("mixed_precison", "bf16", ["unknown setting 'mixed_precison'", "did you mean 'mixed_precision'?"]),
        ("mixed_precision", "bf61", ["mixed_precision='bf61'", "one of no, fp16, bf16, fp8"]),
        ("num_processes", "two", ["num_processes='two' is not an integer or none"]),
        ("num_processes", 0, ["num_processes=0 is below 1"]),
        ("gradient_accumulation_steps", "0", ["gradient_accumulation_steps=0 is below 1"]),
        ("gradient_accumulation_steps", 1.5, ["gradient_accumulation_steps=1.5 is not an integer"]),
        ("gradient_accumulation_steps", True, ["gradient_accumulation_steps=True is not an integer"]),
        ("cpu", "perhaps", ["cpu='perhaps' is not true or false"]),
        ("seed", -1, ["seed=-1 is below 0"]),
    ],
)
def test_an_invalid_setting_is_rejected(name: str, value: object, texts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(RunConfig, [_layer(name, value, SettingSource.FLAG)])
    assert "flag from-FLAG" in str(raised.value)
    assert all(text in str(raised.value) for text in texts)
    assert raised.value.do


@pytest.mark.parametrize("debug", [True, False])
def test_the_program_overrides_debug_of_a_flag(debug: bool) -> None:
    resolved = resolve(RunConfig, [from_flags({"debug": (not debug, "--debug")})])
    exported = {"ACCELERATE_DEBUG_MODE": str(not debug).lower(), "ECHELON_DEBUG": None}
    with environ.patch({"ECHELON_CONFIG": encode(resolved), **exported}):
        assert (is_debug(), current().value.debug) == (not debug, not debug)
        set_debug(debug)
        assert (is_debug(), current().value.debug) == (debug, debug)


@pytest.mark.parametrize("text", ["{", "[1]", '{"seed": 3}', '{"seed": [1, 99, "x"]}'])
def test_invalid_settings_from_the_launcher_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="ECHELON_CONFIG does not contain"):
        decode(text)


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        from_file(tmp_path / "none.yaml")


def test_show_prints_values_origins_and_overridden_values() -> None:
    layers = [_layer("seed", 1, SettingSource.ENV), _layer("seed", 2, SettingSource.FLAG)]
    lines = show(resolve(RunConfig, layers)).splitlines()
    (line,) = [line for line in lines if line.startswith("seed")]
    assert line.split() == ["seed", "2", "flag", "from-FLAG", "(overrides", "1", "from", "env", "from-ENV)"]
    assert len(lines) == len(field_names(RunConfig))


def test_a_variable_of_echelon_takes_effect_without_the_launcher_or_is_refused() -> None:
    from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    with environ.patch({"ECHELON_FSDP_VERSION": "2", "ECHELON_PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}):
        assert FullyShardedDataParallelPlugin().fsdp_version == 2
        assert ParallelismConfig().dp_shard_size == 2
        resolved = current()
        assert resolved.value.use_parallelism_config is True
        assert str(resolved.origins["use_parallelism_config"]) == (
            "derived from parallelism_config_dp_shard_size, env ECHELON_PARALLELISM_CONFIG_DP_SHARD_SIZE"
        )
    with environ.patch({"ECHELON_ZERO_STAGE": "3"}):
        with pytest.raises(ConfigError, match="zero_stage=3 would have no effect: the model is not sharded") as raised:
            Accelerator(cpu=True)
        assert raised.value.where == "env ECHELON_ZERO_STAGE"
    with environ.patch({"FSDP_VERSION": "2"}):  # may belong to another program
        assert Accelerator(cpu=True).config.value.fsdp_version == 2


@pytest.mark.parametrize(
    ("value", "source", "is_reported"),
    [
        ("bf16", "FLAG", True),
        ("bf16", "ENV", True),
        ("bf16", "FILE", True),
        ("no", "FLAG", True),  # the default, but requested
        ("no", "ENV", False),  # the default, which launchers export
    ],
)
def test_a_request_that_the_scripts_code_overrides_is_reported(
    value: str, source: str, is_reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from echelon import Accelerator

    code = "bf16" if value == "no" else "no"
    setting = [value, int(SettingSource[source]), "x"]
    with environ.patch({"ECHELON_CONFIG": json.dumps({"mixed_precision": setting})}):
        Accelerator(cpu=True, mixed_precision=code)
    expected = f"mixed_precision={code!r} (from code Accelerator(mixed_precision=)) overrides {value!r}"
    assert (expected in capsys.readouterr().err) is is_reported


def _by_launcher(**values: str) -> dict[str, str]:
    flags = {name: (value, f"--{name}") for name, value in values.items()}
    return {"ECHELON_CONFIG": encode(resolve(RunConfig, [from_flags(flags)]))}


def _by_environment(**values: str) -> dict[str, str]:
    return {f"ECHELON_{name.upper()}": value for name, value in values.items()}


@pytest.mark.parametrize(("given", "origin"), [(_by_launcher, "flag --"), (_by_environment, "env ECHELON_")])
def test_parity_from_outside_the_script_is_used_and_errors_name_its_place(given: Any, origin: str) -> None:
    from echelon import Accelerator

    with environ.patch(given(parity="exact", max_micro_batch_size="4")):
        accelerator = Accelerator(cpu=True)
    assert accelerator.parity == "exact"
    assert str(accelerator.config.origins["parity"]).lower() == f"{origin}parity".lower()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=10))
    assert [len(batch) for (batch,) in loader] == [4, 3, 3]
    alone = environ.patch(given(max_micro_batch_size="4"))
    with alone, pytest.raises(ConfigError, match=f"(?i)=4 .from {origin}max_micro_batch_size"):
        Accelerator(cpu=True)
