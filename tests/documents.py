"""Reads the Markdown documents: their code blocks, links and headings.

A block of Python or shell code runs in the tests as it stands, alone and in a folder of its own (tests/ranks/test_code_blocks.py).
A comment right above a block, or in the first lines of a page for all of its blocks, says otherwise:

* ``<!-- not run: REASON -->``: the test checks syntax and names only.
* ``<!-- run by: tests/launch/test_tour.py -->``: that test runs it.
* ``<!-- run on: 2 processes -->``: a Python block that one process cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ("python",)
SHELL = ("console", "bash", "sh", "shell")

_FENCE = re.compile(r"^( *)(`{3,})(\w*)[ \t]*(.*)$")
_MARK = re.compile(r"<!-- (not run|run by|run on|not parsed): (.+?) -->")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_TOP = 12  # lines in which a mark holds for the whole page


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str
    mark: str
    """``not run``, ``run by``, ``run on``, ``not parsed``, or empty: it runs."""
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def documents() -> list[Path]:
    """Return every Markdown file that readers see."""
    folders = ("docs", "benchmarks", "examples", ".github")
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))])


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    lines = page.read_text(encoding="utf-8").splitlines()
    whole = ("", "")
    opened: tuple[int, re.Match[str], tuple[str, str]] | None = None
    for number, line in enumerate(lines, 1):
        match = _FENCE.match(line)
        if opened is None:
            if mark := _MARK.fullmatch(line.strip()):
                below = lines[number] if number < len(lines) else ""
                if number <= _TOP and not _FENCE.match(below):
                    whole = (mark[1], mark[2])
            if match:
                above = _MARK.fullmatch(lines[number - 2].strip()) if number > 1 else None
                opened = number, match, (above[1], above[2]) if above else whole
        elif match and match[2] == opened[1][2] and not match[3]:
            begin, head, (mark_name, reason) = opened
            indent = len(head[1])
            text = "".join(f"{each[indent:]}\n" for each in lines[begin : number - 1])
            yield Block(
                page=name, line=begin, language=head[3], title=head[4].strip(), text=text, mark=mark_name, reason=reason
            )
            opened = None
    assert opened is None, f"{name}:{opened[0] if opened else 0}: this block is not closed"


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block: the lines behind ``$`` in a console, all lines otherwise, with their continuations."""
    found: list[str] = []
    is_continued = False
    for line in block.text.splitlines():
        typed = line.strip() if block.language != "console" or is_continued else line.strip().removeprefix("$ ")
        is_command = is_continued or block.language != "console" or line.strip().startswith("$ ")
        if is_command and typed and not typed.startswith("#"):
            text = typed.removesuffix("\\").rstrip()
            if is_continued:
                found[-1] += f" {text}"
            else:
                found.append(text)
            is_continued = typed.endswith("\\")
    return found


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    fence = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if (match := _FENCE.match(line)) and (not fence or match[2] == fence):
            fence = "" if fence else match[2]
        elif not fence and (mark := re.match(r'<a id="([\w-]+)"></a>$', line)):
            found[mark[1]] = 1
        elif not fence and (heading := re.match(r"#{1,6} +(.+?) *#*$", line)):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = found.get(slug, 0)
            found[slug] = count + 1
            if count:
                found[f"{slug}_{count}"] = 1  # the site; GitHub writes -1
    return frozenset(found)


def broken_links(page: Path, text: str | None = None) -> Iterator[str]:
    """Yield the links of a page that lead to no file or no heading. Addresses in the network are not tried.

    The Chinese site shows the English page where there is no Chinese one; there, its links lead to the Chinese pages.
    """
    is_shown_in_chinese = not page.name.endswith(".zh.md") and not page.with_suffix(".zh.md").exists()
    fence = ""
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    for number, line in enumerate(lines, 1):
        if (match := _FENCE.match(line)) and (not fence or match[2] == fence):
            fence = "" if fence else match[2]
            continue
        if fence:
            continue
        for target in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z][a-z+.-]*:", target):
                continue
            path, _, anchor = unquote(target).partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or not file.is_relative_to(ROOT):
                yield f"{page.name}:{number}: there is no {path}"
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                yield f"{page.name}:{number}: {file.name} has no heading #{anchor}"
            elif anchor and is_shown_in_chinese:
                chinese = file.with_suffix(".zh.md")
                if chinese.exists() and anchor not in anchors(chinese):
                    mark = f'<a id="{anchor}"></a>'
                    yield f"{page.name}:{number}: {chinese.name} has no heading #{anchor}: write {mark} above it"


def named_documents(name: str, text: str) -> Iterator[str]:
    """Yield the documents that a source file names in docstrings, comments and messages, but that do not exist."""
    for number, line in enumerate(text.splitlines(), 1):
        for path, anchor, quoted in re.findall(r'\b(docs/[\w/.-]+?\.md)(?:#([\w-]+))?(?:, "([^"]+)")?', line):
            file = ROOT / path
            if not file.exists():
                yield f"{name}:{number}: there is no {path}"
                continue
            slug = anchor or re.sub(r"[^\w\- ]", "", quoted.lower()).replace(" ", "-")
            if slug and slug not in anchors(file):
                yield f"{name}:{number}: {path} has no heading {anchor or quoted}"
