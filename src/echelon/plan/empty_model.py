"""Builds models from the configurations of transformers, with tensors that have shapes but no data."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from echelon.base.errors import ConfigError, MissingExtraError
from echelon.base.messages.translation import gettext as _
from echelon.base.similar_path import suggest_path
from echelon.big_models.module_sizes import calculate_maximum_sizes


def weights_only(name: str, *, library: str = "transformers", trust_remote_code: bool = False) -> nn.Module:
    """Return the model without a head, in float32 on the meta device, as accelerate's ``estimate-memory`` loads it.

    Args:
        name: a ``config.json``, its folder, or a name on the hub; of timm, the name of an architecture.

    Raises:
        ConfigError: there is no such model, or the library does not know its class.
    """
    if library == "timm":
        timm = library_named("timm")
        with torch.device("meta"):
            found: nn.Module = timm.create_model(
                name if ":" in name or "/" not in name else f"hf-hub:{name}", pretrained=False
            )
        return found
    config = read_config(name, trust_remote_code=trust_remote_code)
    return _from_config("AutoModel", config, torch.float32, name, trust_remote_code=trust_remote_code)


def trainable(config: Any, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model with the head that its configuration names, on the meta device.

    Args:
        config: what ``read_config`` returned.
        dtype: of the weights; by default, the one in the configuration.

    Raises:
        ConfigError: transformers does not know its class.
    """
    architecture = (config.architectures or [""])[0]
    head = next((head for head in _HEADS if architecture.endswith(head)), "ForCausalLM")
    kind = f"AutoModel{_HEADS.get(head, head)}"
    return _from_config(kind, config, dtype or config.dtype or torch.float32, config.model_type)


# The last part of the name of a class, and of the class of transformers that finds it.
_HEADS = MappingProxyType(
    {
        "ForConditionalGeneration": "ForSeq2SeqLM",
        **{head: head for head in ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")},
    }
)


def largest_layer_and_total(model: nn.Module) -> tuple[float, float]:
    """Return the bytes of the largest layer that is not split, and of the whole model."""
    total, (largest, _names) = calculate_maximum_sizes(model)
    return largest, total


def read_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration in a ``config.json``, in its folder, or of a model on the hub, which transformers loads.

    Raises:
        ConfigError: there is none.
    """
    transformers = library_named("transformers")
    path = Path(name)
    is_path = path.exists() or path.suffix == ".json" or name.startswith((".", "/", "~"))
    if is_path and not path.exists():
        raise ConfigError(
            _("{path} does not exist", path=name),
            do=suggest_path(name, otherwise=_("pass a config.json, or the folder that contains it")),
        )
    try:
        return transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            _("transformers cannot load the configuration of {name}: {error}", name=name, error=first),
            do=_("pass the path of the model's config.json, or log in to the hub if the model is private"),
        ) from error


def library_named(name: str) -> ModuleType:
    """Import the library that builds a model.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            _(
                "{purpose} requires the package {package!r}, which is not installed",
                purpose=_("a plan of this model"),
                package=name,
            ),
            do=f"pip install {name}",
        ) from error


def _from_config(
    kind: str, config: Any, dtype: torch.dtype, name: str, *, trust_remote_code: bool = False
) -> nn.Module:
    transformers = library_named("transformers")
    if trust_remote_code:
        chosen = [one for one in getattr(config, "auto_map", None) or {} if one.startswith("AutoModelFor")]
        kind = chosen[0] if kind == "AutoModel" and chosen else kind
    try:
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, kind).from_config(
                config, dtype=dtype, **({"trust_remote_code": True} if trust_remote_code else {})
            )
    except ValueError as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            _("transformers has no {kind} for {name}: {error}", kind=kind, name=name, error=first),
            do=_("plan for a script that builds the model: echelon plan train.py"),
        ) from error
    return model
