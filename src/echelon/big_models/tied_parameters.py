"""Finds tied parameters, which a model has under several names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from echelon.base.errors import UsageError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_

_logger = get_logger(__name__)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names that share one parameter of ``model``, each group sorted."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Retie each group of names to its first parameter that is not on the meta device."""
    for names in tied_params:
        owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
        found = [getattr(owner, attribute) for owner, attribute in owners]
        real = next((parameter for parameter in found if parameter.device.type != "meta"), None)
        if real is not None:
            for owner, attribute in owners:
                setattr(owner, attribute, real)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a transformers model's configuration ties its embeddings."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        return False
    foreign: Any = model
    text_config = getattr(config, "get_text_config", lambda: config)()
    has_outputs = foreign.get_output_embeddings() is not None
    ties_words = bool(getattr(text_config, "tie_word_embeddings", False)) and has_outputs
    ties_encoder = bool(getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
    return ties_words or ties_encoder


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Log a warning for each group of tied parameters that ``device_map`` spreads across several devices.

    Raises:
        UsageError: the map has no device for a tied parameter.
    """
    for names in tied_params:
        places = {name: device_of(name, device_map) for name in names}
        if len(set(places.values())) > 1:
            _logger.warning(
                N_("the device map spreads tied parameters across several devices, so each device gets a copy: %s"),
                places,
            )


def device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of the tensor or module ``name``, given by the innermost enclosing module in ``device_map``.

    Raises:
        UsageError: the map has no device for ``name``.
    """
    path = name
    while path and path not in device_map:
        path = path.rpartition(".")[0]
    if path not in device_map:
        raise UsageError(
            f"the device map has no device for {name}",
            do='add an entry for it, or for the rest of the model: {"": device}',
        )
    return device_map[path]
