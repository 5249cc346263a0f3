"""Messages in the user's language: every message has a translation, and whole pages are Chinese."""

from __future__ import annotations

import ast
import io
import json
import logging
import pickle
import re
import string
import sys
from pathlib import Path

import pytest

from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.messages import translation
from echelon.base.messages.translation import Translated, gettext as _, in_english, messages_of
from echelon.cli.main import _run
from echelon.config.origin import Origin, SettingSource
from echelon.diagnose.stall import name_ranks
from echelon.launch.failures.failure import ErrorRecord, Frame, RankEnd, explain
from echelon.report.page import render_page
from tests.messages import SOURCE, catalogue, messages

CATALOGUES = sorted(translation.LOCALES.glob("*/LC_MESSAGES/echelon.po"))
ENTRIES = messages_of("zh_CN")
_CHINESE = re.compile("[\u4e00-\u9fff]")
# Words that only English needs.
ENDINGS = {"s", "es", "verb", "verb2", "they", "more"}


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.parents[1].name)
def test_each_message_has_a_translation_and_each_translation_a_message(path: Path) -> None:
    entries = {entry.id: entry for entry in catalogue(path) if entry.id}
    assert entries.keys() == messages(), "run make messages, and translate what is new"
    assert [text for text, entry in entries.items() if not entry.string or entry.fuzzy] == []
    assert messages_of(path.parents[1].name) == {text: entry.string for text, entry in entries.items()}


def _fields(text: str) -> set[str]:
    return {
        f"{name}!{convert}:{spec}" for part, name, spec, convert in string.Formatter().parse(text) if name is not None
    }


def test_placeholders_agree() -> None:
    wrong = []
    for message, text in ENTRIES.items():
        if "%" in message:
            values = r"%[-.\d]*[a-z]"
            wrong += [message] * (re.findall(values, message) != re.findall(values, text))
        if "{" in message and "}" in message:
            names = {field.partition("!")[0] for field in _fields(message) - _fields(text)}
            wrong += [message] * (not names <= ENDINGS or not _fields(text) <= _fields(message))
    assert wrong == []


# Modules that are loaded without echelon, or whose warnings concern who repairs Python.
_ENGLISH_WARNINGS = frozenset({"base/fork_repair.py"})


def test_texts_are_marked_for_translation() -> None:
    """No message is an f-string or inside of one, no comprehension that translates has a variable ``_`` (ruff reports all others: F402,
    F823), and no warning stays English."""
    wrong = []
    paths = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    assert len(paths) > 500
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                is_wrong = any(isinstance(c, ast.Constant) for c in map(_message, ast.walk(node)))
            elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                targets = {
                    part.id for one in node.generators for part in ast.walk(one.target) if isinstance(part, ast.Name)
                }
                is_wrong = "_" in targets and any(map(_message, ast.walk(node)))
            else:
                is_wrong = isinstance(_message(node), ast.JoinedStr) or (
                    name not in _ENGLISH_WARNINGS and _is_english_warning(node)
                )
            if is_wrong:
                wrong.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    assert wrong == []


def test_an_english_warning_is_found() -> None:
    source = 'warn("a b")\nwarnings.warn(f"a {b}", stacklevel=2)\nlogger.warning("a %s", b)\n_logger.error("a b")\n'
    assert _english_warnings(source) == [1, 2, 3, 4]
    assert (
        _english_warnings(
            'warn(_("a {b}", b=b))\nlogger.warning(N_("a %s"), b)\nlogger.info("a b")\nlogger.warning("%s", b)'
        )
        == []
    )


def _english_warnings(source: str) -> list[int]:
    return [node.lineno for node in ast.walk(ast.parse(source)) if _is_english_warning(node)]  # type: ignore[attr-defined]


def _is_english_warning(node: ast.AST) -> bool:
    """Return whether this is a call that warns with a text that is written there and is not marked for translation."""
    if not (isinstance(node, ast.Call) and node.args and _warns(node.func)):
        return False
    text = node.args[0]
    is_text = isinstance(text, ast.Constant) and " " in str(text.value)
    return is_text or (isinstance(text, ast.JoinedStr) and " " in ast.unparse(text))


def _warns(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ("warn", "warn_here")
    is_logger = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return is_logger and (function.value.id, function.attr) in {  # type: ignore[union-attr]
        ("warnings", "warn"),
        *((name, level) for name in ("logger", "_logger") for level in ("warning", "error")),
    }


def _message(node: ast.AST) -> ast.expr | None:
    """Return the first argument of a call of ``_`` or ``N_``."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("_", "N_")
    return node.args[0] if is_call else None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LANG": "zh_CN.UTF-8"}, "zh_CN"),
        ({"LANG": "zh"}, "zh_CN"),
        ({"LANG": "zh_Hans"}, "zh_CN"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "zh_CN.utf8"}, "zh_CN"),
        ({"LANG": "en_US.UTF-8", "LANGUAGE": "zh_CN:en"}, "zh_CN"),
        ({"LANG": "zh_CN.UTF-8", "LANGUAGE": "en:zh_CN"}, None),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, None),
        ({"LANG": "zh_TW.UTF-8"}, None),
        ({"LANG": "de_DE.UTF-8"}, None),
        ({}, None),
    ],
)
def test_the_locale_decides(variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert translation.language() == expected


def test_a_terminal_that_cannot_show_chinese_gets_english(monkeypatch: pytest.MonkeyPatch) -> None:
    _speak_chinese(monkeypatch)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert _("remove one of them") == "remove one of them"


def test_english_reads_no_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    monkeypatch.setattr(translation, "messages_of", None)
    assert type(_("cannot read {path}: {error}", path="a", error="b")) is str
    assert str(ConfigError("a", where="b", do="c")) == "a\n  where: b\n  do:    c"


def test_a_logger_without_handlers_speaks_the_users_language(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logger = logging.getLogger("echelon.a_test")
    monkeypatch.setattr(logger, "propagate", False)  # pytest has handlers above it
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    _speak_chinese(monkeypatch)
    line = "no checkpoint in %s: starting from scratch"
    for text in (line, "what no catalogue knows, 100 %% of %s"):
        get_logger("echelon.a_test").warning(text, tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        ENTRIES[line] % tmp_path,
        f"what no catalogue knows, 100 % of {tmp_path}",
    ]
    logger.addHandler(handler := logging.FileHandler(tmp_path / "log.txt"))
    try:
        get_logger("echelon.a_test").warning(line, _("the answer"))
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (tmp_path / "log.txt").read_text() == line % "the answer" + "\n"


def test_an_error_is_made_in_the_users_language_and_keeps_its_english_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> ConfigError:
        origin = Origin(SettingSource.FLAG, "--num_processes")
        return ConfigError(
            _(
                "{num_processes} processes on {cores} cores: the limit is {per_core} per core",
                num_processes=300,
                cores=2,
                per_core=8,
            ),
            where=str(origin),
            do=_(
                "{lost}={value!r} (from {winner}) overrides {lost_value!r} (from {origin})",
                lost="a",
                value=1,
                winner=origin,
                lost_value=2,
                origin=origin,
            ),
        )

    english = str(made())
    assert english.splitlines()[1:] == [
        "  where: flag --num_processes",
        "  do:    a=1 (from flag --num_processes) overrides 2 (from flag --num_processes)",
    ]
    _speak_chinese(monkeypatch)
    error = pickle.loads(pickle.dumps(made()))
    assert str(error).splitlines()[:2] == [
        "2 \u4e2a CPU \u6838\u4e0a\u6709 300 \u4e2a\u8fdb\u7a0b\uff1a\u4e0a\u9650\u662f\u6bcf\u6838 8 \u4e2a",
        "  \u4f4d\u7f6e\uff1a\u547d\u4ee4\u884c\u53c2\u6570 --num_processes",
    ]
    assert error.in_english() == english
    assert in_english({"a": [error.where, 3]}) == {"a": ["flag --num_processes", 3]}
    assert isinstance(name_ranks([1, 2]), Translated)


def test_a_failure_report_is_a_chinese_page_that_keeps_the_users_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    _speak_chinese(monkeypatch)
    frame = Frame(file="a.py", line=3, function="f")
    record = ErrorRecord(time_ns=1, type="ValueError", message="remove one of them {x}", frames=(frame,))
    ours = ErrorRecord(
        time_ns=2,
        type="echelon.base.errors.UsageError",
        message="a",
        what=_("remove one of them"),
        where="rank 1\uff0cb",
        do="c",
    )
    what, where, do = explain(
        [RankEnd(rank=0, exit_code=1, record=record), RankEnd(rank=1, exit_code=1, record=ours)], logs="/logs"
    )
    assert what.splitlines()[0] == "rank 0 \u6700\u5148\u51fa\u9519\uff1aValueError: remove one of them {x}"
    assert do is not None
    assert where.splitlines() == ["rank 0\uff08\u5171 2 \u4e2a\uff09", "         a.py:3 in f", "         rank 1\uff0cb"]
    assert what.splitlines()[1].startswith("  \u5176\u4ed6\uff1arank 1 ")
    assert do.splitlines() == ["rank 1\uff1ac", "  \u65e5\u5fd7\uff1a/logs"]


def test_help_pages_are_chinese(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _speak_chinese(monkeypatch)
    for argv in (["launch", "--help"], ["launch", "--help_all"], ["--help"], ["verify", "--help"]):
        assert _run(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("\u7528\u6cd5\uff1aechelon")
        prose = [line for line in lines if re.search(r"[a-z]{3,} [a-z]{3,} [a-z]{3,} [a-z]", line)]
        assert [line for line in prose if "echelon launch" not in line] == []


def test_the_report_page_has_the_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"title": "a run", "runs": []}
    _clear(monkeypatch)
    english = render_page(data)
    assert '<html lang="en">' in english
    assert '"texts":{}' in english
    assert not re.search(_CHINESE, english)
    _speak_chinese(monkeypatch)
    chinese = render_page(data)
    assert '<html lang="zh-CN">' in chinese
    assert ENTRIES["Skip to the report"] in chinese
    (texts,) = re.findall(r'"texts":(\{.*?\})\}</script>', chinese)
    assert json.loads(texts)["Where the time went"] == ENTRIES["Where the time went"]


# What the terms do not apply to: code, commands, flags, placeholders, and compounds with another meaning.
_NO_TERMS = re.compile(
    r"`[^`]*`|'[^']*'|\"[^\"]*\"|--[\w-]+|\{[^}]*\}|\w+\([^)]*\)(?:\.\w+)?|\w+\.\w+|\w+=\w*|\b[A-Z_]{3,}\b|\w*_\w*|"
    r"\bechelon checkpoint \w+|\bdevice map\b|\bunsharded\b|\baccelerator = "
)


def _terms() -> list[tuple[str, list[str], list[str]]]:
    page = (SOURCE.parents[1] / "docs" / "translating.md").read_text(encoding="utf-8")
    table = page.partition("<!-- terms: ")[2].partition("<!-- end of terms -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    found = [(row[0], [row[1], *row[2].split("\u3001")], row[3].split("\u3001")) for row in rows[2:]]
    return [(english, [w for w in words if w], [w for w in wrong if w]) for english, words, wrong in found]


@pytest.mark.slow
def test_translations_obey_the_table_of_terms() -> None:
    terms = _terms()
    assert len(terms) > 35
    faults = []
    for msgid, msgstr in ENTRIES.items():
        text = _NO_TERMS.sub(" ", msgid)
        for english, words, wrong in terms:
            is_used = re.search(rf"(?<![\w-]){english}(?:s|es)?(?![\w-])", text)
            if is_used and not any(word in msgstr for word in words):
                faults.append(f"{english} is {words[0]}: {msgid} -> {msgstr}")
            faults += [f"{english} is {words[0]}, not {word}: {msgstr}" for word in wrong if word in msgstr]
    assert faults == []


_PAGES = sorted((SOURCE.parents[1] / "docs").rglob("*.zh.md")) + [SOURCE.parents[1] / "README.zh.md"]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_chinese_pages_obey_the_table_of_terms_and_mark_links_to_english_pages(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`]*`", "``", prose)
    wrong = [word for _, _, words in _terms() for word in words]
    assert [word for word in wrong if word in prose] == []
    unmarked = []
    for match in re.finditer(r"\[([^\]]*)\]\(([\w./]+)\.md(?:#[^)]*)?\)", prose):
        is_english = not match[2].endswith(".zh") and not (page.parent / f"{match[2]}.zh.md").exists()
        if is_english and not prose[match.end() :].startswith(("\uff08\u82f1\u6587", "\uff0c\u82f1\u6587")):
            unmarked.append(match[0])
    assert unmarked == []


def _clear(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)


def _speak_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
