"""The package: its extras and the commands that messages show for them, and what a wheel contains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.base.optional import EXTRAS, install_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# No module of torch can be found, as in an environment without it.
WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] == "torch" else found(name, *rest)
"""


# ---- what messages say ---------------------------------------------------------------------------------------------


def test_messages_name_the_requirements_of_the_extras() -> None:
    extras = {name: tuple(requirements) for name, requirements in PROJECT["optional-dependencies"].items()}
    assert {name: found for name, found in EXTRAS.items() if name != "torch"} == extras
    assert EXTRAS["torch"] == tuple(one for one in PROJECT["dependencies"] if re.match(r"torch\b", one))


def test_the_install_command_can_be_pasted_into_a_shell() -> None:
    assert install_command("galore") == 'pip install "galore-torch>=1.0" "bitsandbytes>=0.43"'


def test_no_message_installs_echelon_by_name() -> None:
    # That name belongs to another project on the public index (docs/install.md).
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]
    by_name = re.compile(r"pip install (?:-\S+ )*['\"]?echelon(?![-\w/])")
    exceptions = {"CHANGELOG.md", "install.md", "install.zh.md", "optional.py"}
    assert [str(path) for path in files if path.name not in exceptions and by_name.search(path.read_text())] == []
    assert by_name.search("pip install 'echelon[hub]'")
    assert not by_name.search("pip install echelon-0.1.0-py3-none-any.whl")


@pytest.mark.parametrize(
    "program",
    [
        "from echelon import Accelerator",
        "from echelon.distributed import shard",
        "from echelon.trainer import Trainer",
        "from echelon.cli.main import main; main(['launch', '--cpu', '--num_processes', '2', 'train.py'])",
    ],
)
def test_without_torch_the_error_shows_the_install_command(program: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    result = subprocess.run(
        [sys.executable, "-c", f"{WITHOUT_TORCH}{program}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1, result.stderr
    lines = result.stderr.splitlines()
    assert lines[-3].endswith("echelon requires the package 'torch', which is not installed in this Python environment")
    assert lines[-2] == f"  where: {sys.prefix}"
    assert lines[-1].startswith('  do:    pip install "torch>=2.7" (docs/install.md has the commands')


def test_without_torch_the_version_and_the_environment_are_shown(tmp_path: Path) -> None:
    program = (
        f"{WITHOUT_TORCH}import echelon; print(echelon.__version__)\nfrom echelon.cli.main import main; main(['env'])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert re.search(r'accelerators +unknown, because torch is not installed: pip install "torch>=2.7"', result.stdout)
