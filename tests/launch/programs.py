"""Scripts of the documents, run in rank processes that are there already: seconds less for each than by a command."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Mapping
from unittest import mock

from echelon.world.group import close_group


def run_program(script: str, folder: str, environ: Mapping[str, str] | None = None) -> str:
    """Run ``script`` in ``folder`` as a program in this rank, and return what it prints."""
    printed, before = io.StringIO(), os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch.object(sys, "path", [folder, *sys.path]), contextlib.redirect_stdout(printed):
            with mock.patch.dict(os.environ, environ or {}):
                runpy.run_path(script, run_name="__main__")
    finally:
        os.chdir(before)
        close_group()  # as the end of a program does
        sys.modules.pop("digits", None)  # the tour's own module: the next folder has another
    return printed.getvalue()
