"""fp8 training with torchao: selects the layers to convert to Float8Linear, and converts them (extra ``fp8``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.base.device import has_fp8
from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import require
from echelon.base.warnings import warn


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and last ``Linear`` in ``model``, or ``(None, None)`` if it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Return False for the named layers and for a ``Linear`` whose sizes are not multiples of 16, otherwise True."""
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False  # fp8 matrix units work on tiles of 16
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Call ``filter_linear_layers`` with the names of the first and last ``Linear`` in ``module``."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether torchao has converted any layer in ``model``.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    kind: Any = require("torchao.float8.float8_linear", extra="fp8", purpose="has_ao_layers").Float8Linear
    return any(isinstance(module, kind) for module in model.modules())


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Convert the linear layers in ``model`` to fp8 in place. Parameter names do not change.

    Args:
        model: the model, already on its device.
        config: a ``torchao.float8.Float8LinearConfig``; None uses torchao's default.
        module_filter_func: returns whether to convert a module; None converts every ``Linear`` with suitable sizes
            except the first and last.

    Raises:
        MissingExtraError: torchao is not installed.
        UsageError: the model itself is a ``Linear``, which cannot be replaced in place.
    """
    float8: Any = require("torchao.float8", extra="fp8", purpose="convert_model_to_fp8_ao")
    chosen = module_filter_func or partial(filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model))
    if float8.convert_to_float8_training(model, module_filter_fn=chosen, config=config) is not model:
        raise UsageError(
            "the model itself is a Linear, which can be converted to fp8 only inside another module",
            do="wrap it in torch.nn.Sequential, or exclude it with module_filter_func",
        )
    if not has_ao_layers(model):
        warn(
            _(
                "no layer of {name} computes in fp8, so the model runs in bf16. By default, a Linear is converted if "
                "both its sizes are multiples of 16 and it is neither the first nor the last; "
                "AORecipeKwargs(module_filter_func=) changes this",
                name=type(model).__name__,
            )
        )


def check_fp8_device(config: Any, *, device: torch.device) -> None:
    """Check that ``device`` supports fp8 matrix products or that ``config`` emulates them.

    Raises:
        ConfigError: ``device`` does not support fp8 matrix products, and ``config`` does not emulate them.
    """
    if config.emulate or has_fp8(device):
        return
    raise ConfigError(
        _(
            "mixed_precision='fp8' is not supported on the device {device}: fp8 matrix products need an NVIDIA "
            "GPU of compute capability 8.9 (Ada, Hopper) or an AMD MI300, or newer",
            device=device,
        ),
        do=_(
            "use bf16, or emulate fp8 (slow) with "
            "kwargs_handlers=[AORecipeKwargs(config=torchao.float8.Float8LinearConfig(emulate=True))]"
        ),
    )
