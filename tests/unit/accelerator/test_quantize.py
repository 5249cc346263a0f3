"""``load_and_quantize_model``: linear layers become layers of bitsandbytes, with values near those of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from echelon import init_empty_weights
from echelon.base.errors import ConfigError, UsageError
from echelon.utils import BnbQuantizationConfig, has_4bit_bnb_layers, load_and_quantize_model

pytest.importorskip("bitsandbytes")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


# The relative error of a layer with 4 bits (16 levels for normally distributed weights) is near 10 %, with 8 bits below 1 %.
@pytest.mark.parametrize(
    ("bits", "options", "error"),
    [
        (4, {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"}, 0.2),
        (4, {"bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_use_double_quant": True}, 0.3),
        (8, {"torch_dtype": "fp32"}, 0.02),
    ],
)
def test_linear_layers_are_quantized_and_the_head_is_not(
    bits: int, options: dict[str, Any], error: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(4, 64)
    expected = model(x)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = Small()
    results = []
    for given, location in ((model, None), (empty, tmp_path)):
        config = BnbQuantizationConfig(**{f"load_in_{bits}bit": True}, **options)
        made = load_and_quantize_model(given, config, weights_location=location)
        assert type(made.body[0]).__name__ == ("Linear4bit" if bits == 4 else "Linear8bitLt")
        assert type(made.head) is nn.Linear
        assert has_4bit_bnb_layers(made) is (bits == 4)
        assert not made.body[0].weight.requires_grad
        results.append(made(x).float())
    assert 0 < ((results[0] - expected).norm() / expected.norm()).item() < error
    assert torch.equal(*results)


def test_named_layers_are_skipped_or_stay_in_float32() -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, skip_modules=["body.0"], keep_in_fp32_modules=["head"])
    made = load_and_quantize_model(Small(), config)
    assert [type(layer).__name__ for layer in (made.body[0], made.body[3], made.head)] == [
        "Linear",
        "Linear4bit",
        "Linear",
    ]
    assert (made.body[0].weight.dtype, made.head.weight.dtype) == (torch.float16, torch.float32)


def test_a_model_stays_on_one_device() -> None:
    config = BnbQuantizationConfig(load_in_4bit=True)
    with pytest.raises(UsageError, match="divided over several devices"):
        load_and_quantize_model(Small(), config, device_map="auto")
    with init_empty_weights():
        empty = Small()
    with pytest.raises(UsageError, match="weights_location="):
        load_and_quantize_model(empty, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "load_in_4bit=False and load_in_8bit=False"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit=True and load_in_8bit=True"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "unknown bnb_4bit_quant_type 'int4'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "float"}, "bnb_4bit_compute_dtype='float' is not a dtype"),
    ],
)
def test_a_wrong_setting_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BnbQuantizationConfig(**options)
