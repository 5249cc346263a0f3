"""The search path for config files."""

from __future__ import annotations

from pathlib import Path

from echelon.base import environ

__all__ = ["PROJECT_FILE", "accelerate_file", "find_config_file", "own_file"]

PROJECT_FILE = "echelon.toml"


def own_file() -> Path:
    """Return the path of this user's echelon config file."""
    home = environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "echelon" / "default_config.toml"


def accelerate_file() -> Path:
    """Return the path of the file that ``accelerate config`` writes."""
    home = environ.get("HF_HOME")
    if home is None:
        home = f"{environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def find_config_file() -> Path | None:
    """Return the project's config file, else the user's echelon file, else accelerate's; None if none of them exists."""
    own, theirs = own_file(), accelerate_file()
    candidates = (
        Path(PROJECT_FILE),
        *(own.with_suffix(suffix) for suffix in (".toml", ".yaml", ".json")),
        *(theirs.with_suffix(suffix) for suffix in (".yaml", ".json")),
    )
    return next((path for path in candidates if path.is_file()), None)
