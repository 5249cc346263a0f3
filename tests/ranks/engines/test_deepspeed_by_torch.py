"""DeepSpeed configs with the engine fsdp2, which does not need the DeepSpeed library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.base.errors import ConfigError
from echelon.utils import DeepSpeedPlugin, get_active_deepspeed_plugin
from tests.harness import run_on_ranks


def _settings(config: dict[str, Any], given: dict[str, Any]) -> tuple[str, int]:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **config})
    accelerator = Accelerator(engine="fsdp2", deepspeed_plugin=plugin, **given)
    return accelerator.mixed_precision, accelerator.gradient_accumulation_steps


def _agreement() -> None:
    config = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4}
    assert _settings(config, {}) == ("bf16", 4)
    assert _settings(config, {"mixed_precision": "bf16", "gradient_accumulation_steps": 4}) == ("bf16", 4)
    with pytest.raises(ConfigError, match=r"mixed_precision='fp16' .*'bf16' .*bf16.enabled\) contradict each other"):
        _settings(config, {"mixed_precision": "fp16"})
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=2 .* and 4 .* contradict each other"):
        _settings(config, {"gradient_accumulation_steps": 2})


def test_the_plugin_and_the_accelerator_must_agree_on_precision_and_accumulation() -> None:
    run_on_ranks(_agreement, world_size=1)


def _shown() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3)
    accelerator = Accelerator(engine="fsdp2", deepspeed_plugin={"only": plugin})
    assert accelerator.state.deepspeed_plugin is plugin
    assert get_active_deepspeed_plugin(accelerator.state) is plugin
    assert accelerator.state.get_deepspeed_plugin("only") is plugin
    assert plugin.selected
    assert (str(accelerator.distributed_type), accelerator.is_fsdp2) == ("DistributedType.FSDP", True)


def test_the_state_shows_the_plugin() -> None:
    run_on_ranks(_shown, world_size=1)


def _clipped(clipping: Any, in_the_loop: float | None) -> float:
    """Return by how much a weight moves whose gradient has a norm of 20."""
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "gradient_clipping": clipping})
    accelerator = Accelerator(engine="fsdp2", deepspeed_plugin=plugin)
    model = nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 4), 10.0)).sum())
    if in_the_loop is not None:
        accelerator.clip_grad_norm_(model.parameters(), in_the_loop)
    optimizer.step()
    state = accelerator.get_state_dict(model)
    assert state is not None
    return float((state["weight"] - before).norm())


@pytest.mark.parametrize(
    ("clipping", "in_the_loop", "expected"),
    [(0.5, None, 0.5), (0.5, 3.0, 0.5), ("auto", None, 1.0), ("auto", 3.0, 3.0), (0.0, None, 20.0)],
)
def test_each_step_clips_to_the_configured_norm(clipping: Any, in_the_loop: float | None, expected: float) -> None:
    assert run_on_ranks(_clipped, clipping, in_the_loop, world_size=1)[0] == pytest.approx(expected, rel=1e-5)
