"""The file in a run's folder that records its settings, their origins and the overridden values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import Resolved, Shadowed, resolve
from echelon.config.schema import RunConfig

RUN_FILE = "config.json"


def to_run_file(resolved: Resolved[RunConfig]) -> str:
    """Return the contents of the file for a run with these settings."""
    chosen = {
        name: [getattr(resolved.value, name), *_plain(origin)]
        for name, origin in resolved.origins.items()
        if origin.source is not SettingSource.DEFAULT
    }
    shadowed = [[lost.name, lost.value, *_plain(lost.origin), *_plain(lost.winner)] for lost in resolved.shadowed]
    return json.dumps({"settings": chosen, "shadowed": shadowed}, indent=2) + "\n"


def of_run(folder: str | Path) -> Resolved[RunConfig]:
    """Return the settings of the run in ``folder``.

    Raises:
        ConfigError: the folder does not contain a run, or the file is corrupt.
    """
    path = Path(folder) / RUN_FILE
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        layer = {name: Setting(value, _origin(*place)) for name, (value, *place) in data["settings"].items()}
        shadowed = tuple(
            Shadowed(name=name, value=value, origin=_origin(*place[:2]), winner=_origin(*place[2:]))
            for name, value, *place in data["shadowed"]
        )
    except OSError as error:
        raise ConfigError(
            _("{folder} is not a run folder, because {path} is missing", folder=folder, path=path.name),
            do=_("pass the folder of a run (echelon launch writes to ./echelon-runs, or to --log_dir)"),
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            _("{path} is not a valid record of a run's settings: {error}", path=path, error=error),
            do=_("pass the folder of a run (echelon launch writes to ./echelon-runs, or to --log_dir)"),
        ) from error
    resolved = resolve(RunConfig, [layer])
    return Resolved(value=resolved.value, origins=resolved.origins, shadowed=shadowed)


def _plain(origin: Origin) -> tuple[str, str]:
    return origin.source.name, origin.detail


def _origin(source: str, detail: str) -> Origin:
    return Origin(SettingSource[source], detail)
