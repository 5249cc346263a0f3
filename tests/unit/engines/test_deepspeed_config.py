"""DeepSpeed's config without DeepSpeed: "auto" values, conflicts, wrappers, and what fsdp2 does for each key."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.accelerator.prepare.build_deepspeed import resolve_plugin_config, translate_plugin_to_fsdp2
from echelon.base.errors import ConfigError
from echelon.base.warnings import EchelonWarning
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.engines.deepspeed.config import (
    COUNTERPARTS,
    DeepSpeedFacts,
    HfDeepSpeedConfig,
    list_without_counterpart,
    read_deepspeed_config,
    resolve_deepspeed,
)
from echelon.utils import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedPlugin,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
)

# An ordinary file for ZeRO 3, with every key that tutorials set.
ORDINARY: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "auto_cast": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _known(**values: Any) -> dict[str, Setting]:
    return {
        key.replace("__", "."): Setting(value, Origin(SettingSource.CODE, f"Accelerator({key}=)"))
        for key, value in values.items()
    }


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_config_is_read_from_a_file_a_dict_and_text(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ORDINARY))
    coded = base64.urlsafe_b64encode(json.dumps(ORDINARY).encode()).decode()
    for source in (ORDINARY, str(path), path, json.dumps(ORDINARY), coded):
        assert HfDeepSpeedConfig(source).config == ORDINARY
    config = HfDeepSpeedConfig(ORDINARY)
    config.config["zero_optimization"]["stage"] = 1
    assert ORDINARY["zero_optimization"]["stage"] == 3  # the caller's own is left alone
    with pytest.raises(ConfigError, match="DeepSpeed config not found: gone"):
        read_deepspeed_config("gone.json")
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_deepspeed_config(path)


def test_a_config_is_read_by_dotted_keys() -> None:
    config = HfDeepSpeedConfig(ORDINARY)
    assert (config.is_zero3(), config.is_zero2(), config.is_offload()) == (True, False, True)
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert (config.get_value("zero_optimization.nothing", 7), config.get_value("nothing.at.all")) == (7, None)
    assert config.is_true("zero_optimization.overlap_comm")
    assert config.is_false("wall_clock_breakdown")
    assert not config.is_false("nothing")
    config.del_config_sub_tree("zero_optimization.offload_param")
    assert "offload_param" not in config.config["zero_optimization"]
    config.del_config_sub_tree("zero_optimization.offload_param")
    with pytest.raises(ConfigError, match="has no zero_optimization"):
        config.del_config_sub_tree("zero_optimization.offload_param", must_exist=True)


# ---- "auto" ----------------------------------------------------------------------------------------------------------


def test_every_auto_is_resolved_with_its_origin() -> None:
    facts = DeepSpeedFacts(
        world_size=4,
        settings=_known(gradient_accumulation_steps=2, gradient_clipping=0.5, fp16__enabled=False, bf16__enabled=True),
        batch_sizes=(8,),
        hidden_size=100,
        model="GPT",
    )
    config, origins = resolve_deepspeed(ORDINARY, facts, origin=Origin(SettingSource.FILE, "ds.json"))
    zero = config["zero_optimization"]
    assert [zero[key] for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size")] == [10_000, 9_000]
    assert zero["stage3_param_persistence_threshold"] == 1_000
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert (config["train_batch_size"], config["gradient_clipping"]) == (64, 0.5)
    assert (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (False, True)
    assert origins.keys() == _flat(ORDINARY).keys()
    shown = {key: str(origin) for key, origin in origins.items()}
    assert shown["train_batch_size"] == (
        "derived train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 2 x 4 processes"
    )
    assert shown["zero_optimization.reduce_bucket_size"] == "derived hidden size 100 of GPT"
    assert shown["gradient_clipping"] == "code Accelerator(gradient_clipping=)"
    assert shown["zero_optimization.stage"] == "file ds.json zero_optimization.stage"
    assert ORDINARY["train_batch_size"] == "auto"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("zero_optimization.reduce_bucket_size", "auto", "Net has no config.hidden_size"),
        ("train_micro_batch_size_per_gpu", "auto", "no loader with a batch size was prepared"),
        ("optimizer.params.lr", "auto", "none of the run's settings determines it"),
        ("gradient_accumulation_steps", "many", "to be an integer, but got 'many'"),
    ],
)
def test_an_unresolvable_auto_is_an_error_that_names_the_key(key: str, value: Any, says: str) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    node = config
    *path, last = key.split(".")
    for name in path:
        node = node.setdefault(name, {})
    node[last] = value
    with pytest.raises(ConfigError) as caught:
        resolve_deepspeed(config, DeepSpeedFacts(world_size=2, model="Net"))
    assert key in str(caught.value)
    assert says in str(caught.value)


def test_text_and_numbers_are_the_same() -> None:
    config = {"train_batch_size": "16", "train_micro_batch_size_per_gpu": 4.0, "gradient_accumulation_steps": "2"}
    facts = DeepSpeedFacts(world_size=2, settings=_known(gradient_accumulation_steps=2), batch_sizes=(4,))
    assert resolve_deepspeed(config, facts)[0] == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
    }


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            {"gradient_accumulation_steps": 8},
            [
                "gradient_accumulation_steps=8 (from file ds.json gradient_accumulation_steps)",
                "2 (from code Accelerator(",
            ],
        ),
        (
            {"train_micro_batch_size_per_gpu": 16},
            ["train_micro_batch_size_per_gpu=16 (from file ds.json", "4 (from derived DataLoader(batch_size=))"],
        ),
        (
            {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            [
                "train_batch_size=100 (from file ds.json",
                "x 2 processes = 16",
                "gradient_accumulation_steps=2 (from file",
            ],
        ),
        ({"bf16": {"enabled": True}}, ["bf16.enabled=True (from file ds.json bf16.enabled)", "False (from code"]),
    ],
)
def test_conflicting_values_are_an_error_with_both_origins(config: dict[str, Any], parts: list[str]) -> None:
    facts = DeepSpeedFacts(
        world_size=2, settings=_known(gradient_accumulation_steps=2, bf16__enabled=False), batch_sizes=(4,)
    )
    with pytest.raises(ConfigError) as caught:
        resolve_deepspeed(config, facts, origin=Origin(SettingSource.FILE, "ds.json"))
    assert [part for part in parts if part not in str(caught.value)] == []


# ---- the plugin ------------------------------------------------------------------------------------------------------


def test_dummies_and_the_model_fill_the_config(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": "auto", "total_num_steps": "auto", "warmup_num_steps": "auto"},
        },
        **ORDINARY,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    plugin.set_mixed_precision("bf16")
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"hidden_sizes": [16, 32]})()  # type: ignore[assignment]
    optimizer = DummyOptim(model.parameters(), lr=0.5, weight_decay=0.1)
    resolve_plugin_config(
        plugin,
        world_size=2,
        accumulation=Setting(2, Origin(SettingSource.CODE)),
        batch_sizes=[8, 4],
        models=[model],
        optimizers=[optimizer],
        schedulers=[DummyScheduler(optimizer, total_num_steps=101)],
        split_batches=False,
    )
    filled = plugin.deepspeed_config
    assert filled["optimizer"]["params"] == {"lr": 0.5, "weight_decay": 0.1}
    assert filled["scheduler"]["params"] == {"warmup_max_lr": 0.5, "total_num_steps": 51, "warmup_num_steps": 1}
    assert (filled["train_micro_batch_size_per_gpu"], filled["train_batch_size"]) == (4, 16)  # is_train_batch_min
    assert filled["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert (filled["bf16"], filled["fp16"]["enabled"]) == ({"enabled": True}, False)
    assert str(plugin.origins["optimizer.params.lr"]) == "code DummyOptim(lr=)"
    (shown,) = (record.message for record in caplog.records if "were resolved from" in record.message)
    assert "zero_optimization.reduce_bucket_size=1024" in shown
    assert "train_batch_size=16" in shown


def test_wrappers_are_for_engines_that_were_made_by_hand() -> None:
    calls: list[Any] = []

    class Engine:
        def set_gradient_accumulation_boundary(self, *, is_boundary: bool) -> None:
            calls.append(is_boundary)

        def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
            calls.append(("backward", loss.item(), kwargs))

        def step(self) -> None:
            calls.append("step")

        def get_global_grad_norm(self) -> torch.Tensor:
            return torch.tensor(2.0)

    wrapper = DeepSpeedEngineWrapper(Engine())
    wrapper.backward(torch.tensor(1.0), sync_gradients=False)
    wrapper.backward(torch.tensor(3.0), retain_graph=True)
    assert calls == [False, ("backward", 1.0, {}), True, ("backward", 3.0, {"retain_graph": True}), "step"]
    assert wrapper.get_global_grad_norm() == 2.0
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = DeepSpeedOptimizerWrapper(inner)
    optimizer.step()
    optimizer.zero_grad()
    assert (optimizer.step_was_skipped, optimizer.param_groups[0]["lr"]) == (False, 0.1)
    schedule = DeepSpeedSchedulerWrapper(torch.optim.lr_scheduler.StepLR(inner, 1), optimizer)
    schedule.step()
    assert (schedule.get_last_lr(), schedule.optimizers) == ([0.1], optimizer)


# ---- fsdp2 -----------------------------------------------------------------------------------------------------------


def test_every_key_of_an_ordinary_file_is_in_the_table() -> None:
    assert [key for key in _flat(ORDINARY) if key not in COUNTERPARTS] == []


def test_settings_without_a_counterpart_in_fsdp2_warn_once() -> None:
    config = {
        **ORDINARY,
        "mystery": 3,
        "zero_optimization": {**ORDINARY["zero_optimization"], "reduce_bucket_size": 5e8},
    }
    told = list_without_counterpart(_flat(config))
    assert [line.partition("=")[0] for line in told] == [
        "fp16.hysteresis",
        "fp16.min_loss_scale",
        "zero_optimization.sub_group_size",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "steps_per_print",
        "mystery",
    ]
    with pytest.warns(EchelonWarning, match="has no counterpart for these DeepSpeed config keys: fp16.hysteresis=2"):
        plugin, scaling = translate_plugin_to_fsdp2(DeepSpeedPlugin(hf_ds_config=config))
    assert (plugin.reshard_after_forward, plugin.cpu_offload.pin_memory) == (True, True)
    assert (scaling.init_scale, scaling.growth_interval) == (2.0**16, 1000)
    plugin, scaling = translate_plugin_to_fsdp2(DeepSpeedPlugin(zero_stage=2))
    assert plugin.reshard_after_forward is False
    assert type(plugin.cpu_offload).__name__ == "OffloadPolicy"
    for key in ("optimizer", "scheduler"):
        with pytest.raises(ConfigError, match=f"{key}'\\), which fsdp2 does not create"):
            translate_plugin_to_fsdp2(DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}, key: {}}))
