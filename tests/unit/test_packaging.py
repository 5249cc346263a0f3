"""The package: its extras and the commands that messages show for them, and what a wheel contains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from echelon._version import __version__
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
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.py")]
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


# ---- what a release consists of ------------------------------------------------------------------------------------


def test_the_pages_on_installation_show_the_command_of_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [name for name in EXTRAS if name != "torch" and f"`{install_command(name)}`" not in page] == []
    shown = re.findall(r'`(pip install "[^`]*>=[^`]*)`', (ROOT / "docs" / "install.zh.md").read_text(encoding="utf-8"))
    assert shown
    assert set(shown) <= {install_command(name) for name in EXTRAS}


def test_every_document_of_a_release_names_this_version() -> None:
    version = re.escape(__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)", changelog, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    dated = re.fullmatch(rf"\[{version}\] - (\d{{4}}-\d\d-\d\d)", headings[1])
    assert dated is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], str(citation["date-released"])) == (__version__, dated[1])
    for page in ("README.md", "README.zh.md", "docs/install.md", "docs/install.zh.md"):
        wheels = set(
            re.findall(r"echelon_train-([\w.]+?)-py3-none-any\.whl", (ROOT / page).read_text(encoding="utf-8"))
        )
        assert wheels == {__version__}, page


def test_the_issue_forms_ask_for_the_environment() -> None:
    for form in ("bug", "feature"):
        fields = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())["body"]
        assert any("`echelon env`" in field["attributes"].get("label", "") for field in fields)


def test_a_wheel_contains_the_package_and_nothing_else() -> None:
    packed = {file.distribution_path: file.path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    source = [path for path in ROOT.glob("src/**/*") if path.is_file() and "__pycache__" not in path.parts]
    tracked = {path.relative_to(ROOT / "src").as_posix() for path in source if ".egg-info" not in str(path)}
    assert tracked - set(packed) == set()
    assert "echelon/py.typed" in packed
    assert {name.partition("/")[0] for name in packed} == {"echelon"}


@pytest.mark.parametrize(
    ("repository", "shown"),
    [
        ("", "a parity and [torch](https://pytorch.org)\n\n```python\nx[0](y)  # [no](link)\n```\n"),
        (
            "https://host/us/echelon",
            "[only](https://host/us/echelon/blob/v1.2/b.md)\n\n"
            "a [parity](https://host/us/echelon/blob/v1.2/docs/parity.md#x) and [torch](https://pytorch.org)\n\n"
            "```python\nx[0](y)  # [no](link)\n```\n![alt text](https://host/us/echelon/raw/v1.2/docs/a.svg)\n",
        ),
    ],
)
def test_the_readme_of_an_index_has_no_relative_links(repository: str, shown: str) -> None:
    readme = (
        "[only](b.md)\n\na [parity](docs/parity.md#x) and [torch](https://pytorch.org)\n\n"
        "```python\nx[0](y)  # [no](link)\n```\n![alt text](docs/a.svg)\n"
    )
    found = run_path(str(ROOT / "hatch_build.py"))["readme_of_index"](readme, repository, "v1.2")
    assert found.lstrip("\n") == shown
