"""The plugin of DeepSpeed: its defaults, its variables, its arguments, and what an Accelerator refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon import Accelerator
from echelon.base.errors import ConfigError
from echelon.utils import (
    DeepSpeedPlugin,
)


def test_a_plugin_has_accelerate_s_defaults() -> None:
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.offload_optimizer_device, plugin.gradient_clipping) == (2, "none", "auto")
    assert (plugin.zero3_init_flag, plugin.zero3_save_16bit_model, plugin.selected) == (False, False, False)
    assert plugin.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": float("inf"),
    }


def test_a_plugin_reads_the_variables_of_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "ZERO_STAGE": "3",
        "OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "OFFLOAD_PARAM_DEVICE": "nvme",
        "OFFLOAD_PARAM_NVME_PATH": "/nvme",
        "ZERO3_INIT": "false",
        "ZERO3_SAVE_16BIT_MODEL": "true",
        "MOE_LAYER_CLS_NAMES": "Expert, Router",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_DEEPSPEED_{name}", value)
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "1.0")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    plugin = DeepSpeedPlugin(offload_optimizer_device="none")
    zero = plugin.deepspeed_config["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (3, "none")  # code over environment
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/nvme"}
    assert (plugin.zero3_init_flag, plugin.zero3_save_16bit_model) == (False, True)
    assert (plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (1.0, 4)
    assert plugin.leaf_classes == ("Expert", "Router")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    plugin = DeepSpeedPlugin()
    # The file says what it says, over the variables; they fill in what it leaves open.
    assert (plugin.zero_stage, plugin.get_value("gradient_clipping")) == (1, 1.0)


def test_an_argument_beside_a_config_fills_its_auto_or_must_agree() -> None:
    config = {"zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}}
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero_stage=3)
    assert (plugin.zero_stage, plugin.offload_param_device, plugin.hf_ds_config.is_zero3()) == (3, "cpu", True)
    with pytest.raises(
        ConfigError, match=r"offload_param_device='none' \(from code DeepSpeedPlugin.*='cpu'.*contradict each other"
    ):
        DeepSpeedPlugin(hf_ds_config=config, offload_param_device="none")
    with pytest.raises(ConfigError, match="has no 'zero_optimization'"):
        DeepSpeedPlugin(hf_ds_config={})
    with pytest.raises(ConfigError, match="zero_stage=4 is not one of 0, 1, 2, 3"):
        DeepSpeedPlugin(zero_stage=4)
    with pytest.raises(ConfigError, match="offload_optimizer_device='gpu' is not one of none, cpu, nvme"):
        DeepSpeedPlugin(offload_optimizer_device="gpu")
    with pytest.raises(ConfigError, match="MS-AMP is not supported"):
        DeepSpeedPlugin(enable_msamp=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"deepspeed_plugin": 3}, "deepspeed_plugin is a int"),
        ({"deepspeed_plugin": {"a": DeepSpeedPlugin(), "b": DeepSpeedPlugin()}}, "contains 2 plugins (a, b)"),
        ({"deepspeed_plugin": DeepSpeedPlugin(), "deepspeed_plugins": DeepSpeedPlugin()}, "are both set"),
        ({"deepspeed_plugin": DeepSpeedPlugin(), "engine": "ddp"}, "engine='ddp' and DeepSpeed settings"),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1), "engine": "fsdp2"}, "use engine='zero1'"),
        (
            {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme"), "engine": "fsdp2"},
            "offload_param.device='nvme' has no counterpart in fsdp2",
        ),
    ],
)
def test_an_accelerator_rejects_unsupported_plugin_settings(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True, **given)
    assert says in str(caught.value)
