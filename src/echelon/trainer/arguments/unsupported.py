"""The transformers TrainingArguments settings that echelon does not support; setting one raises an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.base.errors import ConfigError

__all__ = ["UNSUPPORTED", "refuse_optimizer", "refuse_unsupported"]

# setting -> what to do instead
UNSUPPORTED: Mapping[str, str] = {
    "trackio_static_space_id": "remove this setting and create the static view with the trackio command line",
}
# name -> (reason, optimizer to use instead)
_EARLY = "it steps during the backward pass, before gradients are accumulated over batches and reduced across ranks"
_OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("lomo", "adalomo"), (_EARLY, "adafactor")),
    **{
        f"{name}_layerwise": (_EARLY, name)
        for name in ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
    },
    "adamw_torch_xla": ("echelon does not run on TPUs", "adamw_torch"),
    "adamw_torch_npu_fused": ("torch's fused AdamW also runs on NPUs", "adamw_torch_fused"),
    "adamw_apex_fused": ("it needs apex, which transformers has dropped", "adamw_torch_fused"),
    "adamw_anyprecision": ("its package, torchdistx, is no longer maintained", "adamw_torch with bf16=True"),
}


def refuse_unsupported(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Check that no unsupported setting differs from its default.

    Raises:
        ConfigError: a setting that would have no effect differs from its default.
    """
    for name, instead in UNSUPPORTED.items():
        # None, 0, "" and [] are equivalent.
        if values[name] != defaults[name] and (values[name] or defaults[name]):
            raise ConfigError(
                f"{name}={values[name]!r} is not supported by echelon",
                where=f"TrainingArguments.{name}",
                do=instead,
            )


def refuse_optimizer(name: str) -> None:
    """Check that the optimizer is supported.

    Raises:
        ConfigError: echelon does not support the optimizer; the message gives the reason.
    """
    if name in _OPTIMIZERS:
        why, instead = _OPTIMIZERS[name]
        raise ConfigError(
            f"optim={name!r} is not supported: {why}", where="TrainingArguments.optim", do=f"use {instead}"
        )
