"""The layers: flags, environment variables, files, code, and the one JSON that the launcher hands to the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.config.origin import Origin, Setting, Source
from echelon.config.resolve import Layer, Resolved, resolve
from echelon.config.schema import RunConfig, coerce, field_names

__all__ = ["CONFIG_VARIABLE", "current", "decode", "encode", "from_code", "from_environment", "from_file", "from_flags"]

CONFIG_VARIABLE = "ECHELON_CONFIG"

# Foreign variable -> our field. Compatibility is data (DESIGN: configuration); our own are ECHELON_<FIELD>.
_FOREIGN_VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "cpu",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_DEBUG_MODE": "debug",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_DYNAMO_MODE": "dynamo_mode",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "dynamo_use_fullgraph",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "dynamo_use_dynamic",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "dynamo_use_regional_compilation",
}
# How many processes to start is the launcher's question; a variable of that name must not follow a run into its ranks.
_OWN_VARIABLES = {f"ECHELON_{name.upper()}": name for name in field_names(RunConfig)}


def from_flags(values: Mapping[str, tuple[object, str]]) -> Layer:
    """Make a layer of command-line flags: field -> (value, the flag as it was typed)."""
    return {name: Setting(value, Origin(Source.FLAG, flag)) for name, (value, flag) in values.items()}


def from_code(owner: str, values: Mapping[str, object]) -> Layer:
    """Make a layer of the arguments given in code to ``owner``; None means that the argument was not given."""
    return {
        name: Setting(value, Origin(Source.CODE, f"{owner}({name}=)"))
        for name, value in values.items()
        if value is not None
    }


def from_environment() -> Layer:
    """Make a layer of the ``ECHELON_*`` variables, and of those of other libraries that mean the same."""
    layer: dict[str, Setting] = {}
    for variable, name in (*_FOREIGN_VARIABLES.items(), *_OWN_VARIABLES.items()):  # ours last: they win over foreign
        text = environ.get(variable)
        if text is not None:
            layer[name] = Setting(text, Origin(Source.ENV, variable))
    return layer


def from_file(path: str | Path) -> Layer:
    """Make a layer of a YAML or JSON file: one mapping of settings; each keeps its line.

    Raises:
        ConfigError: the file is missing, is no YAML, or holds something else than one mapping.
    """
    import yaml  # noqa: PLC0415 - 20 ms that `echelon --help` and a run without a file need not pay

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}", do="check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", do="mend the file at the place named above") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise ConfigError(f"{path} holds no mapping of settings", do="write lines of the form `name: value`")
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in root.value}
    return {
        str(name): Setting(value, Origin(Source.FILE, f"{path}:{lines[str(name)]}")) for name, value in data.items()
    }


def encode(resolved: Resolved[RunConfig]) -> str:
    """Write the chosen (not the default) settings and their origins as one JSON text, for ``ECHELON_CONFIG``."""
    values: dict[str, Any] = asdict(resolved.value)
    chosen = {
        name: [values[name], int(origin.source), origin.detail]
        for name, origin in resolved.origins.items()
        if origin.source is not Source.DEFAULT
    }
    return json.dumps(chosen, sort_keys=True)


def decode(text: str) -> Layer:
    """Read what ``encode`` wrote, so that rank 3 still says "flag --mixed-precision".

    Raises:
        ConfigError: the text was not written by ``encode``.
    """
    try:
        return {
            str(name): Setting(value, Origin(Source(source), str(detail)))
            for name, (value, source, detail) in json.loads(text).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{CONFIG_VARIABLE} does not hold a configuration written by echelon launch: {error}",
            where=f"env {CONFIG_VARIABLE}",
            do=f"unset {CONFIG_VARIABLE}; it is made by the launcher, not by hand",
        ) from error


def current(code: Layer | None = None) -> Resolved[RunConfig]:
    """Resolve the configuration of this process: ``code`` over what the launcher resolved over the environment."""
    text = environ.get(CONFIG_VARIABLE)
    handed = decode(text) if text else {}
    # The launcher has weighed the environment already, and also exports what it found under accelerate's names: only a
    # variable that says something else (one set in the script, say) counts beside what it handed over.
    later = {
        name: setting for name, setting in from_environment().items() if not _says(handed.get(name), name, setting)
    }
    return resolve(RunConfig, [handed, later, code or {}])


def _says(handed: Setting | None, name: str, setting: Setting) -> bool:
    """Tell whether ``setting`` repeats what the launcher handed over."""
    return handed is not None and handed.value == coerce(RunConfig, name, setting.value, where=str(setting.origin))
