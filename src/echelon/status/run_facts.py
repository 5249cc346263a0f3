"""The facts about a run that are known when it starts: its command line, the state of the code, versions, and the machine."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from echelon._version import __version__
from echelon.base.cores import usable_cores
from echelon.base.limits import text_of

_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "datasets",
    "accelerate",
    "peft",
    "trl",
    "deepspeed",
    "torchao",
)

_HIDDEN = "***"
# A name is split at punctuation and capitals: hub_token and apiKey are secrets, tokenizer and max_tokens are not.
_NAME_PARTS = re.compile(r"[A-Z]*[a-z\d]+|[A-Z\d]+")
_SECRET_PARTS = frozenset(
    {
        "token",
        "password",
        "passwords",
        "passwd",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "key",
        "keys",
        "apikey",
        "accesskey",
        "secretkey",
        "privatekey",
        "passphrase",
        "pwd",
        "signature",
    }
)
_SECRET_ENDS = ("token", "password", "passwd", "secret")  # of names without capitals, such as hftoken
_PLURALS = re.compile(r"(?i)(?:keys|secrets|passwords|credentials|tokens)\d*$")
_ASSIGNMENT = re.compile(r"(?P<name>-{0,2}[+~]*[A-Za-z_][\w.\-]*)=(?P<value>.*)", re.DOTALL)
_FLAG = re.compile(r"--?[A-Za-z][\w.\-]*")
_VALUE = r"""(?P<value>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&}\]]+)"""
# Within a word: fields of JSON and YAML, and parameters of an address or of a shell's command.
_FIELD = re.compile(
    r"""(?P<begin>(?P<quote>["']?)\b(?P<name>[A-Za-z_][\w.\-]*)(?P=quote)\s*(?::(?!//)|=)\s*)""" + _VALUE
)
_FLAG_IN_TEXT = re.compile(r"(?P<begin>(?<!\S)--?(?P<name>[A-Za-z][\w.\-]*)\s+)(?!-)" + _VALUE)
_BEARER = re.compile(r"(?P<begin>\b(?:Bearer|Basic)\s+)[\w.~+/=-]{8,}")
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]+@")
# The prefixes of the tokens of Hugging Face, OpenAI, GitHub, GitLab and AWS.
_KNOWN_TOKEN = re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|AKIA)[\w-]{12,}")


def mask_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line's words, with ``***`` for the values of flags and variables whose names suggest a secret."""
    masked: list[str] = []
    is_secret = has_several = False
    for word in words:
        is_value = is_secret and not word.startswith("--")
        masked.append(_HIDDEN if is_value else _masked(word))
        if not (is_value and has_several):
            is_secret = _FLAG.fullmatch(word) is not None and _is_secret(word)
            has_several = is_secret and _PLURALS.search(word) is not None
    return masked


def mask_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values by name, also nested ones, with ``***`` for those whose names suggest a secret, and secrets in texts.

    The number of a name such as ``pad_token_id`` or ``key_dim``, which ends in another word, is kept.
    """
    return {name: _HIDDEN if _hides(name, value) else _mask_value(value) for name, value in values.items()}


def _hides(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    is_number = isinstance(value, (int, float))
    return _is_secret((_NAME_PARTS.findall(name) or [""])[-1] if is_number else name)


def _mask_value(value: Any) -> Any:
    if isinstance(value, dict):
        return mask_values(value)
    if isinstance(value, list):
        return [_mask_value(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value


def mask_text(text: str) -> str:
    """Return ``text``, of any number of lines, with ``***`` for values that it names as secrets and for well-known kinds of tokens."""
    return "\n".join(map(_masked, text.split("\n")))


def _masked(word: str) -> str:
    found = _ASSIGNMENT.fullmatch(word)
    if found is not None:
        return f"{found['name']}={_HIDDEN if _is_secret(found['name']) else _masked(found['value'])}"
    for pattern in (_FIELD, _FLAG_IN_TEXT):
        word = pattern.sub(lambda found: found["begin"] + _HIDDEN if _is_secret(found["name"]) else found[0], word)
    word = _BEARER.sub(rf"\g<begin>{_HIDDEN}", word)
    return _KNOWN_TOKEN.sub(_HIDDEN, _URL_PASSWORD.sub(rf"\1:{_HIDDEN}@", word))


def _is_secret(name: str) -> bool:
    if name.endswith(("Error", "Exception")):  # KeyError: 'labels'
        return False
    parts = [part.lower().rstrip("0123456789") for part in _NAME_PARTS.findall(name)]
    return any(part in _SECRET_PARTS or part.endswith(_SECRET_ENDS) for part in parts)


@final
class GitQuery:
    """A query for the commit of the code in ``folder``, which runs while the caller does other work."""

    def __init__(self, folder: str | Path) -> None:
        command = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
        self._process: subprocess.Popen[bytes] | None
        try:
            self._process = subprocess.Popen(
                [*command, "--untracked-files=no"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError:  # git is not installed
            self._process = None

    @property
    def is_done(self) -> bool:
        """Whether ``answer`` returns at once."""
        return self._process is None or self._process.poll() is not None

    def answer(self, *, timeout_s: float = 5.0) -> dict[str, Any] | None:
        """Return the commit, the branch, and whether files differ from the commit; None if ``folder`` is in no repository."""
        if self._process is None:
            return None
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:  # a large repository on a slow disk
            self._process.kill()
            self._process.communicate()
            return None
        lines = output.decode(errors="replace").splitlines()
        headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
        commit, branch = headers.get("branch.oid"), headers.get("branch.head")
        if self._process.returncode or commit is None or commit == "(initial)":
            return None
        is_dirty = any(not line.startswith("#") for line in lines)
        return {"commit": commit, "branch": None if branch == "(detached)" else branch, "is_dirty": is_dirty}


def package_versions() -> dict[str, str]:
    """Return the versions of Python, echelon, and the packages that affect a training run."""
    return {"python": platform.python_version(), "echelon": __version__, **installed_versions(_PACKAGES)}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of ``packages`` that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def processor_name(root: Path = Path("/")) -> str:
    """Return the name of the machine's processor."""
    found = re.search(r"^model name\s*:\s*(.+)$", text_of(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def machine_facts(root: Path = Path("/")) -> Mapping[str, Any]:
    """Return the machine's name, system, processor, cores, memory and accelerators.

    Args:
        root: root of the file system.
    """
    return MappingProxyType(
        {
            "host": socket.gethostname(),
            "system": f"{platform.system()} {platform.release()}",
            "processor": processor_name(root),
            "num_cores": usable_cores(root),
            "memory_mb": _memory_mb(),
            "accelerators": _accelerators(root),
        }
    )


def _memory_mb() -> int:
    if sys.platform == "win32":
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def _accelerators(root: Path) -> list[str]:
    """Return the names of NVIDIA's GPUs, from the driver's files: torch would initialize CUDA, and take seconds."""
    texts = [text_of(path) for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    return [found[1] for text in texts if (found := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE))]


def process_start_ns() -> int:
    """Return this process's start time as ``time.monotonic_ns``, or the current time if it is unknown."""
    now = time.monotonic_ns()
    try:
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
        )
        since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError, IndexError, ValueError):  # not Linux
        return now
    return min(now, now - since_boot + ticks * 10**9 // os.sysconf("SC_CLK_TCK"))
