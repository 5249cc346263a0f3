"""Settings of TrainingArguments that this version knows by name and cannot do yet: asking for one is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.base.errors import ConfigError

__all__ = ["NOT_OFFERED", "refuse_what_is_not_offered"]

# setting -> what to do instead. One line goes when its feature comes.
NOT_OFFERED: Mapping[str, str] = {
    "trackio_static_space_id": "leave it out, and make the static view with trackio's own command",
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
