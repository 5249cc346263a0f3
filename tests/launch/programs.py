"""Scripts of the documents, run in rank processes that are there already: seconds less for each than by a command."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest import mock

from echelon.world.group import close_group

_HASH = re.compile(r"\b[0-9a-f]{12}\b")


def run_program(
    script: str, folder: str, environ: Mapping[str, str] | None = None, *, arguments: Iterable[str] = ()
) -> str:
    """Run ``script`` in ``folder`` as a program in this rank, and return what it prints."""
    printed, before = io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(sys, "path", [str(Path(script).parent.resolve()), *sys.path]),
            mock.patch.object(sys, "argv", [script, *arguments]),
            mock.patch.dict(os.environ, environ or {}),
            contextlib.redirect_stdout(printed),
        ):
            runpy.run_path(script, run_name="__main__")
    finally:
        os.chdir(before)
        close_group()  # as the end of a program does
        sys.modules.pop("digits", None)  # the tour's own module: the next folder has another
    return printed.getvalue()


def check_lines(output: str, expected: Iterable[str]) -> None:
    """Require the lines of a page in ``output``, in order. Numbers and hashes of weights may differ: they are of other data."""
    rest = output.splitlines()
    for line in filter(None, expected):
        parts = [
            re.sub(r"\d+(?:\\?\.\d+)?(?:e\\?[-+]\d+)?", r"[-\\d.e+]+", re.escape(part))
            for part in _HASH.split(line.strip())
        ]
        pattern = re.compile(_HASH.pattern.join(parts))
        places = [place for place, printed in enumerate(rest) if pattern.fullmatch(printed.strip())]
        assert places, f"the page says {line!r}, and the program prints\n{output}"
        rest = rest[places[0] + 1 :]


def hashes_of(text: str) -> list[str]:
    """Return the hashes of weights in ``text``."""
    return _HASH.findall(text)
