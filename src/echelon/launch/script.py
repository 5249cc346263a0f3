"""The program to run, and checks on it that need neither a process nor torch."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tokenize
import warnings
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.base.similar_path import suggest_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program and its arguments."""

    kind: Literal["script", "module", "program"]
    """A Python file, a Python module (``python -m``), or any executable."""
    target: str
    args: tuple[str, ...]
    has_local_rank: bool = False
    """Whether to insert ``--local_rank=N`` before ``args``, like DeepSpeed's launcher."""

    @property
    def name(self) -> str:
        """The program's name for its run: the last part of a module's name, or a file's name without its extension."""
        return self.target.rpartition(".")[2] if self.kind == "module" else Path(self.target).stem

    def args_of(self, local_rank: int) -> tuple[str, ...]:
        """Return the arguments for process ``local_rank``."""
        return (f"--local_rank={local_rank}", *self.args) if self.has_local_rank else self.args


def check(script: Script) -> None:
    """Raise an error if the program would fail at startup on every rank.

    Raises:
        ConfigError: the target does not exist, is a directory, cannot be read, or is not Python source.
    """
    if script.kind == "module":
        _check_module(script.target)
    elif script.kind == "program":
        _check_program(script.target)
    else:
        _check_source(script.target)


def _check_module(name: str) -> None:
    # Check only the top-level package, because looking up a submodule would import its parents.
    top = name.partition(".")[0]
    path = [os.getcwd(), *sys.path]
    is_file = name.endswith(".py") and os.path.isfile(name)
    if is_file or not top or (top not in sys.builtin_module_names and PathFinder.find_spec(top, path) is None):
        do = (
            _("echelon launch {name} (without -m) runs a file", name=name)
            if os.path.exists(name)
            else _("check the name, or install the module with pip")
        )
        raise ConfigError(_("no module named {top!r}", top=name if is_file else top), where=f"-m {name}", do=do)


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        do = _("chmod +x {name}, or remove --no_python", name=name) if os.path.isfile(name) else _("check the path")
        raise ConfigError(_("{name} is not an executable program", name=name), where="--no_python", do=do)


def _check_source(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        raise ConfigError(
            _("{name} is a directory, not a Python script", name=name),
            do=_("pass a file, for example {name}", name=path / "train.py"),
        )
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        do = _("check the path; use -m for a module, or --no_python for a program that is not Python")
        if name in ("python", "python3"):
            do = _("leave out {name}: the command runs the script with Python", name=name)
        raise ConfigError(
            _("the script {name} does not exist", name=name),
            where=_("directory {folder}", folder=os.getcwd()),
            do=suggest_path(name, otherwise=do),
        ) from error
    except OSError as error:
        raise ConfigError(
            _("cannot read the script {name}: {strerror}", name=name, strerror=error.strerror),
            do=_("check its permissions"),
        ) from error
    try:
        encoding, _lines = tokenize.detect_encoding(io.BytesIO(data).readline)
        data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            _(
                "{name} is not valid {encoding} text: byte 0x{byte:02x}",
                name=name,
                encoding=error.encoding,
                byte=data[error.start],
            ),
            where=f"{name}:{line}",
            do=_("save it as UTF-8, or declare its encoding in the first line, as in `# -*- coding: latin-1 -*-`"),
        ) from error
    except SyntaxError as error:  # unknown encoding, or a first line that is not UTF-8
        raise ConfigError(
            _("{name} is not Python source: {msg}", name=name, msg=error.msg),
            where=f"{name}:1",
            do=_("save it as UTF-8, or declare its encoding in the first line, as in `# -*- coding: latin-1 -*-`"),
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show these warnings
            compile(data, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        source = f": {error.text.strip()}" if error.text else ""
        raise ConfigError(
            _("syntax error: {msg}", msg=error.msg), where=f"{name}:{error.lineno}{source}", do=_("fix this line")
        ) from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise ConfigError(
            _("{name} is not Python source: {error}", name=name, error=error), where=name, do=_("pass a Python file")
        ) from error
