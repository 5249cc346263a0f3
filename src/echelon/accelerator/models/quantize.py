"""Quantizes the linear layers of a model with bitsandbytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.accelerator.models.load_pretrained import load_checkpoint_in_model
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import require
from echelon.base.warnings import warn
from echelon.big_models.set_tensor import as_device
from echelon.big_models.tied_parameters import find_tied_parameters
from echelon.compat.enums import CustomDtype
from echelon.engines.quantized_weights import bitsandbytes_layers

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """How ``load_and_quantize_model`` quantizes a model.

    Args:
        load_in_8bit: quantize to 8 bits; needs an accelerator to be fast.
        llm_int8_threshold: activations above it are multiplied in float16 (8 bits only).
        load_in_4bit: quantize to 4 bits.
        bnb_4bit_quant_type: ``"fp4"`` or ``"nf4"``.
        bnb_4bit_use_double_quant: also quantize the scales.
        bnb_4bit_compute_dtype: the dtype of the multiplication, or ``"fp32"``, ``"fp16"``, ``"bf16"``.
        torch_dtype: the dtype of the other weights. None: float16 for 8 bits, the compute dtype for 4 bits.
        skip_modules: names of layers that are not quantized. None: the last layer, and layers with tied weights.
        keep_in_fp32_modules: names of modules that are not quantized and stay in float32.

    Raises:
        ConfigError: neither or both of 4 and 8 bits are set, or a value is invalid.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.load_in_4bit is self.load_in_8bit:
            raise ConfigError(
                f"load_in_4bit={self.load_in_4bit} and load_in_8bit={self.load_in_8bit}",
                where="BnbQuantizationConfig",
                do="set exactly one of them to True",
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigError(
                f"unknown bnb_4bit_quant_type {self.bnb_4bit_quant_type!r}",
                where="BnbQuantizationConfig",
                do="choose 'fp4' or 'nf4'",
            )
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        default = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = default if self.torch_dtype is None else _dtype("torch_dtype", self.torch_dtype)
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8


def _dtype(name: str, value: Any) -> torch.dtype:
    dtype = _DTYPES.get(value, value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"{name}={value!r} is not a dtype",
            where="BnbQuantizationConfig",
            do=f"pass a torch.dtype, or one of {', '.join(map(repr, _DTYPES))}",
        )
    return dtype


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Any = None,
    no_split_module_classes: Any = None,
    max_memory: Any = None,
    offload_folder: Any = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load weights into ``model``, replace its linear layers by quantized ones of bitsandbytes, and return it on one device.

    The weights are read at full precision into host memory, and quantized layer by layer.

    Args:
        model: with weights, or on the meta device (``init_empty_weights``).
        weights_location: the file or folder with the weights of a model on the meta device (``load_checkpoint_in_model``).
        device_map: ``{"": device}``. None: the accelerator of this process, or the CPU.
        no_split_module_classes, max_memory, offload_folder, offload_state_dict: not supported, because the model stays whole.

    Raises:
        UsageError: the model is on the meta device and ``weights_location`` is None, or it would be split over several devices.
        MissingDependencyError: bitsandbytes is not installed.
    """
    if no_split_module_classes or max_memory or offload_folder or not (device_map is None or set(device_map) == {""}):
        raise UsageError(
            "the quantized model would be divided over several devices",
            where="load_and_quantize_model()",
            do="remove max_memory, offload_folder and no_split_module_classes, and pass device_map={'': device}",
        )
    config = bnb_quantization_config
    layers = require("bitsandbytes.nn", extra="bitsandbytes", purpose="load_and_quantize_model()")
    if any(parameter.is_meta for parameter in model.parameters()):
        if weights_location is None:
            raise UsageError(
                f"{type(model).__name__} is on the meta device and has no values",
                where="load_and_quantize_model()",
                do="pass the folder with its weights as weights_location=",
            )
        load_checkpoint_in_model(model, weights_location)
    keep = config.keep_in_fp32_modules or []
    skip = [*(_default_skips(model) if config.skip_modules is None else config.skip_modules), *keep]
    chosen = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not any(name == part or f".{part}." in f".{name}." for part in skip)
    }
    if not chosen:
        warn(_("{name} has no torch.nn.Linear layers to quantize (GPT-2 has Conv1D layers)", name=type(model).__name__))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point():
            is_kept = any(part in name for part in keep)
            parameter.data = parameter.data.to(torch.float32 if is_kept else config.torch_dtype)
    if device_map:
        device = as_device(device_map[""])
    else:
        device = as_device(torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu")
    for name, layer in chosen.items():
        model.set_submodule(name, _quantized(layer, config, layers).to(device))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit  # type: ignore[assignment]
    return model.to(device)


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether ``model`` has 4-bit layers of bitsandbytes."""
    return any(True for _ in bitsandbytes_layers(model, "Linear4bit"))


def _quantized(layer: nn.Linear, config: BnbQuantizationConfig, layers: Any) -> nn.Module:
    """Return the layer of bitsandbytes for ``layer``; it quantizes its weight when it is moved to a device."""
    sizes = (layer.in_features, layer.out_features, layer.bias is not None)
    if config.load_in_8bit:
        made = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=config.llm_int8_threshold, device="meta")
        made.weight = layers.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"compress_statistics": config.bnb_4bit_use_double_quant, "quant_type": config.bnb_4bit_quant_type}
        made = layers.Linear4bit(*sizes, config.bnb_4bit_compute_dtype, device="meta", **kind)
        made.weight = layers.Params4bit(layer.weight.data, requires_grad=False, module=made, **kind)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.data, requires_grad=False)
    made.train(layer.training)
    return made  # type: ignore[no-any-return]


def _default_skips(model: nn.Module) -> list[str]:
    """Return the names of the last layer and of layers with tied weights; none for a model without a head."""
    tied = [name.rpartition(".")[0] for names in find_tied_parameters(model) for name in names]
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    return [*tied, *last]
