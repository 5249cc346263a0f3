"""Variables that begin with ECHELON_: a slip of the hand is an error, a site's own variable a warning, once for a job."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from echelon.base import environ
from echelon.base.errors import ConfigError, LaunchError
from echelon.base.warnings import EchelonWarning
from echelon.cli.main import _run
from echelon.config import sources
from echelon.config.sources import CONFIG_VARIABLE, current, without_effect

SOURCE = Path(__file__).resolve().parents[3] / "src" / "echelon"


@pytest.fixture(autouse=True)
def a_new_process() -> None:
    sources._warn_once.cache_clear()


@pytest.mark.parametrize("name", ["ECHELON_HELD", "ECHELON_CLUSTER", "ECHELON_SITE_SCRATCH", "ECHELON_HOME"])
def test_an_unknown_variable_of_a_site_warns_once(name: str) -> None:
    with environ.patch({name: "1", "ECHELON_SEED": "7"}):
        with pytest.warns(EchelonWarning, match=f"ignoring unknown environment variables: {name}"):
            assert current().value.seed == 7
        assert current().value.seed == 7  # a second warning would be an error here


def test_only_rank_zero_or_the_launcher_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.base.warnings.known_rank", lambda: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with environ.patch({"ECHELON_HELD": "1"}):
            current()
            monkeypatch.setattr("echelon.base.warnings.known_rank", lambda: 0)
        with environ.patch({"ECHELON_HELD": "1", CONFIG_VARIABLE: "{}"}):
            current()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ECHELON_SEDE", "ECHELON_SEED"),
        ("ECHELON_SEAD", "ECHELON_SEED"),
        ("ECHELON_SEEDS", "ECHELON_SEED"),
        ("ECHELON_PARIT", "ECHELON_PARITY"),
        ("ECHELON_MIXED_PRECISON", "ECHELON_MIXED_PRECISION"),
        ("ECHELON_NUM_PROCESES", "ECHELON_NUM_PROCESSES"),
        ("ACCELERATE_MIXED_PRECISON", "ACCELERATE_MIXED_PRECISION"),
    ],
)
def test_a_misspelt_variable_is_an_error_with_a_suggestion(name: str, meant: str) -> None:
    with environ.patch({name: "1"}), pytest.raises(ConfigError, match=f"did you mean {meant}\\?"):
        current()


def test_the_launcher_warns_once_for_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(job: Any, *_: Any) -> None:
        assert CONFIG_VARIABLE in job.environment
        raise LaunchError("the ranks are started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("echelon.cli.launch.run_job", start)
    Path("train.py").write_text("")
    with environ.patch({"ECHELON_HELD": "1"}):
        assert _run(["launch", "-q", "--cpu", "--num_processes=2", "train.py"]) == 1
    told = capsys.readouterr().err
    assert told.count("echelon: warning: ignoring unknown environment variables: ECHELON_HELD") == 1
    assert "the ranks are started" in told


def test_every_variable_of_the_source_is_known() -> None:
    names = {n for path in SOURCE.rglob("*.py") for n in re.findall(r'"(ECHELON_[A-Z_]+)"', path.read_text("utf-8"))}
    assert len(names) > 10
    no_variables = {"ECHELON_", "ECHELON_DATA", "ECHELON_WEIGHTS"}  # a prefix, and the names of constants
    with environ.patch(dict.fromkeys(names - no_variables, "1")):
        assert without_effect() is None
