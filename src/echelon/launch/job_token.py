"""The secret that a run's launchers share to protect their connections and their store."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _

TOKEN_VARIABLE = "ECHELON_TOKEN"
TOKEN_FILE_VARIABLE = "ECHELON_TOKEN_FILE"
_MIN_CHARACTERS = 16
_MAX_BYTES = 4096


def default_token_file() -> Path:
    """Return the file to which ``echelon token`` writes this user's token."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(home) / "echelon" / "token"


def find_token() -> bytes | None:
    """Return the token from ECHELON_TOKEN, ECHELON_TOKEN_FILE or the user's token file, in this order, or None if there
    is no token.

    Raises:
        ConfigError: the token cannot be read, is too short, or is in a file that other users can read.
    """
    text = environ.get(TOKEN_VARIABLE)
    if text is not None:
        return _checked(text.strip().encode(), _("env {name}", name=TOKEN_VARIABLE))
    named = environ.get(TOKEN_FILE_VARIABLE)
    if named is not None:
        return read_token(Path(named), _("env {name}", name=TOKEN_FILE_VARIABLE))
    own = default_token_file()
    return read_token(own, str(own)) if os.path.exists(own) else None


def make_token_file(path: Path) -> bool:
    """Write a new token to ``path``, readable only by its owner. Return False if the file already exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    except FileExistsError:
        return False
    return True


def read_token(path: Path, where: str) -> bytes:
    """Return the token in a file; ``where`` says in errors which setting named it.

    Raises:
        ConfigError: as ``find_token``.
    """
    try:
        with path.open("rb") as file:
            # A pipe (/dev/stdin) needs no check, because other users cannot open it.
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & 0o077:
                raise ConfigError(
                    _("other users can read the token in {path} (mode {mode:o})", path=path, mode=stat.S_IMODE(mode)),
                    where=where,
                    do=_("create a new token that only you can read: rm {path}; echelon token {path}", path=path),
                )
            return _checked(file.read(_MAX_BYTES).strip(), where)
    except OSError as error:
        raise ConfigError(
            _("cannot read the token in {path}: {strerror}", path=path, strerror=error.strerror),
            where=where,
            do=_("use a file that you can read"),
        ) from error


def _checked(token: bytes, where: str) -> bytes:
    if len(token) < _MIN_CHARACTERS:
        raise ConfigError(
            _("the token has only {length} characters, so it can be guessed", length=len(token)),
            where=where,
            do=_("create a token with `echelon token`"),
        )
    return token
