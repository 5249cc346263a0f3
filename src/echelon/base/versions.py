"""Compares the versions of installed packages."""

from __future__ import annotations

import importlib.metadata
import operator
import re

from echelon.base.errors import UsageError

STR_OPERATION_TO_FUNC = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
try:
    torch_version = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch_version = ""  # so that `echelon env` works without torch

_PRE_RELEASE = {"dev": -4, "a": -3, "alpha": -3, "b": -2, "beta": -2, "rc": -1, "c": -1}


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Compare a library's version with ``requirement_version``.

    Args:
        library_or_version: name of an installed library, or a version (a string or a ``packaging`` object).
        operation: one of ``> >= == != <= <``.
        requirement_version: such as ``2.7.0``.

    Raises:
        UsageError: the operation is unknown.
        PackageNotFoundError: the library is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise UsageError(f"unknown operation={operation!r}", do=f"pass one of {', '.join(STR_OPERATION_TO_FUNC)}")
    text = str(library_or_version)
    if isinstance(library_or_version, str) and not re.match(r"v?\d", text):
        text = importlib.metadata.version(text)
    return bool(STR_OPERATION_TO_FUNC[operation](_key(text), _key(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of the installed torch with ``version``."""
    return compare_versions(torch_version, operation, version)


def at_least(version: str, least: str) -> bool:
    """Return whether ``version`` is ``least`` or later."""
    return _key(version) >= _key(least)


def _key(version: str) -> tuple[tuple[int, ...], int, int]:
    """Return a PEP 440 sort key (release, pre-release kind, pre-release number), ignoring a local part such as ``+cpu``."""
    match = re.match(r"v?(\d+(?:\.\d+)*)[._-]?(dev|alpha|beta|rc|a|b|c)?\.?(\d*)", version.strip().lower())
    if match is None:
        raise UsageError(f"{version!r} is not a version", do="pass a version such as 2.7.0")
    release = [int(part) for part in match[1].split(".")]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release), _PRE_RELEASE.get(match[2] or "", 0), int(match[3] or 0) if match[2] else 0
