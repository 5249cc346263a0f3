"""A release: two builds of the last commit are equal, contain what they should, and train in an empty environment."""

from __future__ import annotations

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon._version import __version__
from echelon.base.optional import install_command

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".venv-release" / "bin" / "python"
WHEEL = f"echelon_train-{__version__}-py3-none-any.whl"
SDIST = f"echelon_train-{__version__}.tar.gz"
# Extras whose packages are small.
EXTRAS = ("notebook", "schedulefree")
SECRETS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_\w{30,}|\bhf_\w{30,}|\bpypi-\w{30,}|//[^/\s\"'{}<>]+:[^/\s\"'{}<>]+@"
)
# Folders of a person or of a machine; /home/me and /home/user may stand in examples.
FOLDERS = re.compile(rb"(?<![\w.}*])/(?:root|work|builds|home/(?!me/|user/)\w+|Users/\w+)/")
# What a program prints whose environment is not that of the tests.
SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

import echelon

accelerator = echelon.Accelerator()
model, loader = torch.nn.Linear(8, 1), DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for x, y in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step(); optimizer.zero_grad()
accelerator.print("trained on", accelerator.num_processes, "with", echelon.__file__)
"""


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    if not TOOLS.exists():
        text = f"NO RELEASE CHECKED: there is no {TOOLS} (make release-check)"
        assert os.environ.get("REQUIRE_RELEASE") != "1", text
        pytest.skip(text)


def _run(*command: object, cwd: Path, timeout: float = 120, check: bool = True, **variables: str) -> str:
    """Run ``command`` without this process's Python and echelon variables, and return all of its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ECHELON", "VIRTUAL"))}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert not check or result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders with a wheel and an sdist. The second wheel is built from the second sdist, by the standard command."""
    epoch = _run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    folders = []
    for name, arguments in (("first", ["--wheel", "--sdist"]), ("second-with-a-longer-name", [])):
        folder = tmp_path_factory.mktemp(name)
        _run("git", "archive", "--format=tar", "-o", folder / "source.tar", "HEAD", cwd=ROOT)
        source = folder / "source"
        source.mkdir()
        with tarfile.open(folder / "source.tar") as archive:
            archive.extractall(source, filter="data")
        if arguments == []:  # a checkout at another time, with other permissions
            for path in source.rglob("*"):
                os.utime(path, (1_000_000_000, 1_000_000_000))
                path.chmod(0o700 if path.is_dir() else 0o600)
        command = [TOOLS, "-m", "build", "--no-isolation", "--outdir", folder / "dist", *arguments]
        _run(*command, cwd=source, SOURCE_DATE_EPOCH=epoch)
        folders.append(folder / "dist")
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def files(built: tuple[Path, Path]) -> dict[str, bytes]:
    """Path in the wheel -> content."""
    with zipfile.ZipFile(built[0] / WHEEL) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


@pytest.fixture(scope="module")
def metadata(files: dict[str, bytes]) -> email.message.Message:
    return email.message_from_bytes(files[f"echelon_train-{__version__}.dist-info/METADATA"])


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of an environment in which pip has installed nothing but the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    _run(sys.executable, "-m", "venv", folder, cwd=folder)
    found = folder / "bin" / "python"
    pip = [found, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    _run(*pip, built[0] / WHEEL, cwd=folder, timeout=1200)
    yield found
    shutil.rmtree(folder)  # a gigabyte with torch


# ---- the work tree -------------------------------------------------------------------------------------------------


def test_everything_is_committed() -> None:
    changed = _run("git", "status", "--porcelain", cwd=ROOT)
    assert changed == "", "the last commit is built: commit or remove these files first"


def test_nothing_is_unreleased() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(
        rf"^## \[Unreleased\]\n\n## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE
    )


def test_the_documents_link_to_files_that_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    missing = []
    for page in pages:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(((?!\w+:|#)[^)\s#]+)", text):
            if not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert missing == []


# ---- the two files -------------------------------------------------------------------------------------------------


def test_two_builds_are_equal_byte_for_byte(built: tuple[Path, Path]) -> None:
    for folder in built:
        assert sorted(path.name for path in folder.iterdir()) == sorted([WHEEL, SDIST])
    for name in (WHEEL, SDIST):
        assert (built[0] / name).read_bytes() == (built[1] / name).read_bytes(), name


def test_twine_accepts_the_files(built: tuple[Path, Path]) -> None:
    _run(TOOLS, "-m", "twine", "check", "--strict", built[0] / WHEEL, built[0] / SDIST, cwd=ROOT)


def test_the_wheel_contains_every_file_of_the_package(files: dict[str, bytes]) -> None:
    tracked = {path.removeprefix("src/") for path in _run("git", "ls-files", "src/echelon", cwd=ROOT).split()}
    assert tracked - set(files) == set()
    assert "echelon/py.typed" in files
    assert {name.partition("/")[0] for name in files} == {"echelon", f"echelon_train-{__version__}.dist-info"}


def test_the_wheel_contains_no_secret_and_no_path_of_a_machine(files: dict[str, bytes]) -> None:
    configured = _run(TOOLS, "-m", "pip", "config", "list", cwd=ROOT)  # also PIP_INDEX_URL
    hosts = {host.encode() for host in re.findall(r"https?://(?:[^/@\s]*@)?([\w.-]+)", configured)} - {b"pypi.org"}
    found = [
        (name, match)
        for name, content in files.items()
        for match in [
            *(one[0] for pattern in (SECRETS, FOLDERS) for one in pattern.finditer(content)),
            *(host for host in hosts if host in content),
        ]
    ]
    assert found == []


def test_the_metadata_is_complete(metadata: email.message.Message) -> None:
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("echelon", __version__, ">=3.10")
    assert (metadata["Author"], metadata["License-Expression"]) == ("echelon developers", "Apache-2.0 AND MIT")
    classifiers = metadata.get_all("Classifier") or []
    for expected in (
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
    ):
        assert expected in classifiers
    assert "dev" not in (metadata.get_all("Provides-Extra") or [])
    for url in metadata.get_all("Project-URL") or []:
        assert re.fullmatch(r"\w+, https://(?!HOST|example)\S+", url)
    description = metadata.get_payload()
    assert isinstance(description, str)
    outside_code = re.sub(r"^```.*?^```$", "", description, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\]\((?!https?:)[^)]*\)", outside_code) == []


# ---- in an empty environment ---------------------------------------------------------------------------------------


def test_the_wheel_trains_on_two_processes(python: Path, tmp_path: Path) -> None:
    _run(python, "-m", "pip", "check", cwd=tmp_path)
    assert _run(python.with_name("echelon"), "--version", cwd=tmp_path) == f"echelon {__version__}\n"
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [python.with_name("echelon"), "launch", "--cpu", "--num_processes", "2", "train.py"]
    assert f"trained on 2 with {python.parents[1]}" in _run(*command, cwd=tmp_path)
    # The data files of the package: those of the report and the Chinese messages.
    _run(python.with_name("echelon"), "report", "echelon-runs", "-o", "report.html", cwd=tmp_path)
    assert "uPlot" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "用法" in _run(python.with_name("echelon"), "--help", cwd=tmp_path, LANGUAGE="zh_CN", LC_ALL="C.UTF-8")


def test_the_extras_and_the_commands_of_messages_install_the_same(
    python: Path, built: tuple[Path, Path], tmp_path: Path
) -> None:
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    _run(*pip, "install", "-qq", f"{built[0] / WHEEL}[{','.join(EXTRAS)}]", cwd=tmp_path, timeout=600)
    for extra in EXTRAS:
        command = install_command(extra)
        assert command.startswith("pip install ")
        printed = _run("sh", "-c", f"'{python}' -m {command} --disable-pip-version-check", cwd=tmp_path, timeout=600)
        assert "Requirement already satisfied" in printed
        assert "Collecting" not in printed


def test_without_torch_every_way_in_names_the_command(python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    _run(python, "-m", "pip", "uninstall", "-qq", "-y", "torch", cwd=tmp_path)
    assert _run(python, "-c", "import echelon; print(echelon.__version__)", cwd=tmp_path) == f"{__version__}\n"
    for command in (
        [python, "-c", "from echelon import Accelerator"],
        [python, "-c", "from echelon.distributed import process_group"],
        [python.with_name("echelon"), "launch", "--cpu", "train.py"],
    ):
        printed = _run(*command, cwd=tmp_path, check=False)
        assert f"where: {python.parents[1]}\n  do:    {install_command('torch')} (" in printed


# ---- the result ----------------------------------------------------------------------------------------------------


def test_the_files_are_written_to_dist(built: tuple[Path, Path], pytestconfig: pytest.Config) -> None:
    # The last test, and make release-check stops at the first failure: the files have passed all of the above.
    if os.environ.get("REQUIRE_RELEASE") != "1":
        pytest.skip("only make release-check writes to dist")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    shutil.copytree(built[0], ROOT / "dist")
