"""The error for a missing optional dependency shows the install command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echelon.base.errors import MissingExtraError
from echelon.base.optional import is_available, require


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with a package ``planted`` in it that is gone afterwards."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("planted", "planted.part"):
        monkeypatch.setitem(sys.modules, name, None)  # so that monkeypatch removes what the test imports
        del sys.modules[name]
    return tmp_path / "planted"


def test_an_installed_package_is_returned() -> None:
    import json.decoder

    assert require("json.decoder", extra="optuna", purpose="the report") is json.decoder


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part.deeper"])
def test_the_error_for_a_missing_package_shows_the_pip_command(module: str) -> None:
    with pytest.raises(MissingExtraError) as caught:
        require(module, extra="optuna", purpose="echelon report")
    assert caught.value.what == "echelon report requires the package 'no_such_package', which is not installed"
    assert caught.value.do == 'pip install "optuna>=3.0"'


def test_a_package_with_a_missing_dependency_raises_its_own_error(package: Path) -> None:
    (package / "part.py").write_text("import no_such_package_of_the_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_of_the_package") as caught:
        require("planted.part", extra="optuna", purpose="echelon report")
    assert not isinstance(caught.value, MissingExtraError)


def test_checking_for_a_package_does_not_import_it(package: Path) -> None:
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    assert is_available("planted")
    assert "planted" not in sys.modules


def test_a_missing_package_is_not_available(package: Path) -> None:
    assert not is_available("no_such_package")
    assert not is_available("no_such_package.part")
    assert not is_available("planted.part")
