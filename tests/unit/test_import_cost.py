"""Importing echelon costs milliseconds: the heavy parts come when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _run(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    assert _run("import sys, echelon; print(sorted({'torch', 'numpy', 'yaml', 'click'} & set(sys.modules)))") == "[]"


def test_the_version_and_the_list_of_names_load_no_torch() -> None:
    assert _run("import sys, echelon; echelon.__version__, dir(echelon); print('torch' in sys.modules)") == "False"


def test_the_errors_load_no_torch() -> None:
    assert _run("import sys; from echelon import EchelonError; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_every_public_name_can_be_loaded_without_the_libraries_that_echelon_stands_in_for() -> None:
    program = "import sys, echelon; print([n for n in echelon.__all__ if getattr(echelon, n) is None])\n"
    absent = "{'echelon.ecosystem.swap', 'accelerate', 'transformers'}"
    assert _run(f"{program}print(sorted({absent} & {{*sys.modules}}))") == "[]\n[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    program = "import echelon\ntry:\n    echelon.Acelerator\nexcept AttributeError as error:\n    print(error)"
    assert _run(program) == "module 'echelon' has no attribute 'Acelerator'"


@pytest.mark.slow
def test_a_run_without_live_checks_does_not_import_them() -> None:
    program = "import sys; from echelon import Accelerator; Accelerator(cpu=True); "
    assert _run(f"{program}print([name for name in sys.modules if 'live_check' in name or 'verify' in name])") == "[]"
