"""Settings of TrainingArguments that this version knows by name and cannot do yet: asking for one is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.base.errors import ConfigError

__all__ = ["NOT_OFFERED", "refuse_optimizer", "refuse_what_is_not_offered"]

# setting -> what to do instead. One line goes when its feature comes.
NOT_OFFERED: Mapping[str, str] = {
    "trackio_static_space_id": "leave it out, and make the static view with trackio's own command",
}
# Name -> why it is not offered, and what to do.
_EARLY = "it steps inside the backward pass, before the gradients of other batches and ranks are there"
_OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("lomo", "adalomo"), (_EARLY, "adafactor")),
    **{
        f"{name}_layerwise": (_EARLY, name)
        for name in ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
    },
    "adamw_torch_xla": ("echelon does not run on TPUs", "adamw_torch"),
    "adamw_torch_npu_fused": ("torch's own fused AdamW runs on NPUs, too", "adamw_torch_fused"),
    "adamw_anyprecision": ("its package, torchdistx, has ended", "adamw_torch with bf16=True"),
}


def refuse_what_is_not_offered(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise for the first setting that differs from its default and cannot be given.

    Raises:
        ConfigError: it would otherwise be ignored in silence.
    """
    for name, instead in NOT_OFFERED.items():
        # None, 0, "" and [] in place of one another ask for nothing.
        if values[name] != defaults[name] and (values[name] or defaults[name]):
            raise ConfigError(
                f"{name}={values[name]!r} is not offered yet by this version of echelon",
                where=f"TrainingArguments.{name}",
                do=instead,
            )


def refuse_optimizer(name: str) -> None:
    """Raise for an optimizer of transformers that is not offered.

    Raises:
        ConfigError: it says why.
    """
    if name in _OPTIMIZERS:
        why, instead = _OPTIMIZERS[name]
        raise ConfigError(f"optim={name!r} is not offered: {why}", where="TrainingArguments.optim", do=f"use {instead}")
