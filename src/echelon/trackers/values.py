"""Converts values for logging: tensors to plain numbers, nested settings to flat ones, and secrets to placeholders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_

_SECRET = re.compile(
    r"(^|[_\-. ])(password|passwd|passphrase|secrets?|credentials?|bearer)([_\-. ]|$)"
    r"|(api|access|private|secret)[_\-. ]?keys?$"
    r"|(^|(hub|hf|auth|api|access|refresh|session|wandb|github|bot)[_\-. ]?)token$",
    re.IGNORECASE,
)
HIDDEN = "(hidden)"
_logger = get_logger(__name__)


class DroppedValues:
    """Warns once for each name whose value the tracking library does not accept."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._warned: set[str] = set()

    def warn_once(self, name: str, value: Any, accepted: str) -> None:
        """Warn that ``name`` is not logged, without showing its value."""
        if name not in self._warned:
            self._warned.add(name)
            _logger.warning(
                N_("%s accepts %s; %r is of type %s and is not logged"),
                self._library,
                accepted,
                name,
                type(value).__name__,
            )


def plain(value: Any) -> Any:
    """Convert the tensors and numpy values in ``value`` to Python numbers, or to lists if they have multiple elements.

    Synchronizes with the device.
    """
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.detach().cpu().tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.item() if value.size == 1 else value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum) and isinstance(value.value, (str, int, float)):
        return value.value
    return value


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a scalar that can be plotted."""
    return isinstance(value, (int, float))


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested ``settings`` into (name/of/setting, value) pairs."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def hide_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with passwords, keys and access tokens (recognized by name) replaced.

    A tokenizer's special tokens (``pad_token``) and numbers (``num_tokens``) are kept.
    """
    hidden: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            hidden[key] = hide_secrets(value)
        elif isinstance(value, (str, bytes)) and value and _SECRET.search(str(key)):
            hidden[key] = HIDDEN
        else:
            hidden[key] = value
    return hidden
