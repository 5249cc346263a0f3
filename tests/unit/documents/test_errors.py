"""docs/errors.md describes every class of errors; ``python tests/unit/documents/test_errors.py`` writes the descriptions."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from echelon.base.errors import ConfigError, EchelonError
from echelon.config.files import from_file

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "errors.md"
CHINESE_PAGE = ROOT / "docs" / "errors.zh.md"
BEGIN = "<!-- errors: made by python tests/unit/documents/test_errors.py -->\n"
END = "<!-- end of errors -->\n"


@cache
def error_classes() -> list[type[EchelonError]]:
    """Return EchelonError and all that derive from it, found in the source: one that nobody has imported yet counts."""
    bases: dict[tuple[str, str], list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[module, node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    ours = {"EchelonError"}
    while more := {name for (_, name), names in bases.items() if ours & set(names)} - ours:
        ours |= more
    found = [getattr(import_module(module), name) for module, name in bases if name in ours]
    assert all(issubclass(kind, EchelonError) for kind in found), found
    return found


def parts(kind: type[EchelonError]) -> dict[str, str]:
    """Return what the docstring says: "meaning", and its paragraphs "Causes" and "Do", each on one line."""
    text = inspect.cleandoc(kind.__doc__ or "").replace("``", "`")
    named = re.split(r"^(Causes|Do): ", text, flags=re.MULTILINE)
    found = dict(zip(["meaning", *named[1::2]], named[0::2]))
    return {name: " ".join(words.split()) for name, words in found.items()}


def _section(kind: type[EchelonError]) -> str:
    told = parts(kind)
    also = [
        f"`{base.__name__}`" for base in kind.__mro__[1:] if base is not EchelonError and issubclass(base, Exception)
    ]
    lines = [f"### {kind.__name__}", "", told["meaning"], ""]
    lines += [f"- **Usual causes**: {told['Causes']}", f"- **What to do**: {told['Do']}"]
    codes = f"{kind.exit_code}, for a script" if kind.exit_code != 1 else ""
    lines += [f"- **Exit code**: {codes}"] if codes else []
    caught = [name for name in also if name not in ("`Exception`", "`OSError`")]
    lines += [f"- **Subclass of**: {', '.join(caught)}"]
    return "\n".join([*lines, ""])


@cache
def described() -> list[type[EchelonError]]:
    """Return the classes with a public name, those of ``base`` first; the others only add a base for old scripts."""
    public = [kind for kind in error_classes() if not kind.__name__.startswith("_") and kind is not EchelonError]
    return sorted(public, key=lambda kind: kind.__module__ != EchelonError.__module__)


def written() -> str:
    """Return the page with the descriptions as they must be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    sections = "\n".join(_section(kind) for kind in described())
    return f"{before}{BEGIN}\n{sections}\n{END}{after}"


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == written(), "run python tests/unit/documents/test_errors.py"


def test_the_chinese_page_has_each_message_in_both_languages() -> None:
    page = CHINESE_PAGE.read_text(encoding="utf-8")
    pairs = re.findall(r"^\| `(.*?)` \| `(.*?)` \|", page, re.MULTILINE)
    assert len(pairs) > 8
    assert [english for english, chinese in pairs if not re.search("[\u4e00-\u9fff]", chinese)] == []


def test_every_error_documents_causes_and_remedies() -> None:
    classes = error_classes()
    assert len(classes) >= 15  # the search of the source finds them
    for kind in classes:
        if kind.__name__.startswith("_"):  # shown under the public class that it derives from
            assert any(base in described() for base in kind.__mro__[1:]), kind
        elif kind is not EchelonError:
            assert {"meaning", "Causes", "Do"} == set(parts(kind)), f"{kind.__name__}: docstring without Causes: or Do:"
            assert all(len(words) > 30 for words in parts(kind).values()), kind


@pytest.mark.parametrize(("page", "locale"), [(PAGE, "C"), (CHINESE_PAGE, "zh_CN")], ids=["English", "Chinese"])
def test_the_example_on_the_page_matches_the_output(
    page: Path, locale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text(encoding="utf-8")
    settings = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)[0]
    message = re.findall(r"```text\n(echelon: .*?)```", text, flags=re.DOTALL)[-1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANGUAGE", locale)
    Path("echelon.toml").write_text(settings)
    with pytest.raises(ConfigError) as caught:
        from_file(Path("echelon.toml"))
    assert f"echelon: {caught.value}\n" == message


if __name__ == "__main__":
    PAGE.write_text(written())
