"""What a run needs and this machine does not have: said before anything else is imported or started, with both ways on."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import pytest

from echelon import Accelerator
from echelon.accelerator.prepare.build_deepspeed import build_deepspeed
from echelon.base import environ
from echelon.base.errors import LaunchError, MissingExtraError
from echelon.cli.main import _run
from echelon.config.sources import current
from echelon.utils import DeepSpeedPlugin

CONFIG = Path(__file__).resolve().parents[2] / "data" / "configs" / "zero3_offload.yaml"
# As the launcher writes them for that file.
VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
}
REMEDY = 'pip install "deepspeed>=0.19.8"'


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let deepspeed be a package that is not installed."""

    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] == "deepspeed" else found(name, path, target)

    def version(name: str) -> str:
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    found, installed = PathFinder.find_spec, importlib.metadata.version
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(PathFinder, "find_spec", find_spec)
    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.parametrize("by", ["environment", "plugin", "engine"])
def test_the_error_for_zero_3_without_deepspeed_names_both_remedies(by: str) -> None:
    pytest.importorskip("transformers.integrations.deepspeed")  # it was its error, raised inside Accelerator()
    options: dict[str, Any] = {
        "environment": {},
        "plugin": {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)},
        "engine": {"engine": "deepspeed"},
    }[by]
    with environ.patch(VARIABLES if by == "environment" else {}), pytest.raises(MissingExtraError) as caught:
        Accelerator(cpu=True, **options)
    text = str(caught.value)
    assert "DeepSpeed" in text
    assert "which is not installed" in text
    assert f"{REMEDY}, or pass engine='fsdp2'" in text
    where = {
        "environment": "env ACCELERATE_USE_DEEPSPEED",
        "plugin": "code Accelerator(deepspeed_plugin=)",
        "engine": "code Accelerator(engine=)",
    }
    assert f"where: {where[by]}\n" in text


@pytest.mark.usefixtures("without_deepspeed")
def test_the_remedy_without_deepspeed_works() -> None:
    with environ.patch(VARIABLES):
        use, _ = build_deepspeed(None, None, current(), engine="fsdp2", fsdp_plugin=None)
    assert use.engine == "fsdp2"
    assert use.fsdp_plugin is not None


@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.parametrize(
    ("script", "flags", "is_refused"),
    [
        ("open('ran', 'w')\n", [], True),
        ("open('ran', 'w')  # Accelerator(engine='fsdp2')\n", [], False),  # the ranks see which it is
        ("open('ran', 'w')\n", ["--engine", "fsdp2"], False),
    ],
)
def test_the_launcher_reports_missing_packages_before_starting_ranks(
    script: str,
    flags: list[str],
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    Path("train.py").write_text(script)

    def start(*_: Any) -> None:
        raise LaunchError("the ranks are started")

    monkeypatch.setattr("echelon.cli.launch.run_job", start)
    assert _run(["launch", "--config_file", str(CONFIG), "--num_processes", "2", *flags, "train.py"]) == 1
    told = capsys.readouterr().err
    assert ("the ranks are started" in told) is not is_refused
    if not is_refused:
        return
    assert "requires the package 'deepspeed', which is not installed" in told
    assert f"where: file {CONFIG}:" in told
    assert f"{REMEDY} or pass --engine fsdp2" in told
