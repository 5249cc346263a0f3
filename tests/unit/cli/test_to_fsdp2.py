"""``echelon to-fsdp2`` writes the FSDP settings of accelerate's files with the names and values of version 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.cli.main import _run
from echelon.cli.to_fsdp2 import convert
from echelon.config.files import from_file
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig

OLD = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_use_orig_params": True,
}
NEW = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_version": 2,
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": OLD}))
    return path


def test_the_new_file_has_the_new_names_and_keeps_everything_else(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    assert _run(["to-fsdp2", "--config_file", str(old), "--output_file", str(new)]) == 0
    assert yaml.safe_load(new.read_text()) == {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": NEW}
    settings = resolve(RunConfig, [from_file(new)]).value
    assert (settings.fsdp_version, settings.fsdp_reshard_after_forward) == (2, True)
    assert yaml.safe_load(old.read_text())["fsdp_config"] == OLD


def test_without_overwrite_no_file_is_replaced(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = old.read_text()
    assert _run(["to-fsdp2", "--config_file", str(old)]) == 2
    assert _run(["to-fsdp2", "--config_file", str(old), "--output_file", str(old)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert old.read_text() == before
    assert _run(["to-fsdp2", "--config_file", str(old), "--overwrite"]) == 0
    assert yaml.safe_load(old.read_text())["fsdp_config"] == NEW


@pytest.mark.parametrize(
    ("settings", "resharding", "note"),
    [
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, False, None),
        ({"fsdp_sharding_strategy": 2}, False, None),
        ({"fsdp_reshard_after_forward": "FULL_SHARD"}, True, None),
        ({"fsdp_reshard_after_forward": 4}, 4, None),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, False, "NO_SHARD does not exist"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, True, "parallelism_config_dp_replicate_size"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, False, "parallelism_config_dp_replicate_size"),
    ],
)
def test_what_version_2_cannot_say_is_a_note(settings: dict[str, Any], resharding: object, note: str | None) -> None:
    found, notes = convert(settings)
    assert found["fsdp_reshard_after_forward"] == resharding
    assert [note is not None and note in text for text in notes] == ([True] if note else [])


def test_settings_of_version_2_stay() -> None:
    found, notes = convert(NEW)
    assert found == NEW
    assert "already" in notes[0]


@pytest.mark.parametrize("text", ["a: [", "num_processes: 2", "[]"])
def test_a_file_without_fsdp_settings_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert _run(["to-fsdp2", "--config_file", str(tmp_path / "a.yaml"), "--overwrite"]) == 2
    assert (tmp_path / "a.yaml").read_text() == text
