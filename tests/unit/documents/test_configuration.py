"""docs/configuration.md lists the table of settings; ``python tests/unit/documents/test_configuration.py`` writes the list.

It also writes the list of docs/configuration.zh.md, with the translations of the command line's texts.
"""

# ruff: noqa: RUF001 - full-width punctuation in Chinese texts

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from echelon.base.messages.translation import messages_of
from echelon.config.files import from_file
from echelon.config.key_table import KEYS, SECTIONS, Key
from echelon.config.schema import RunConfig, field_docs, field_types

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"
CHINESE = ROOT / "docs" / "configuration.zh.md"
BEGIN = "<!-- settings: made by python tests/unit/documents/test_configuration.py -->\n"
END = "<!-- end of settings -->\n"


# Texts of settings without a flag, which the command line does not show.
TRANSLATED = {
    "Which settings control sharding: `fsdp_*` or DeepSpeed's. Default: neither; every process holds the whole model.": (
        "由哪一组设置控制分片：`fsdp_*` 或 DeepSpeed 的设置。默认：都不用，每个进程持有整个模型。"
    ),
    "Random seed for the run. Default: no seed is set; the script may set one.": "训练的随机种子。默认：不设置，可由脚本设置。",
}


def tables() -> str:
    head = "| setting | default | meaning | accelerate's variable | flags |"
    return _tables("Top-level settings", head, lambda text: text)


def chinese_tables() -> str:
    known = messages_of("zh_CN")
    return _tables(
        "顶层设置", "| 设置 | 默认值 | 含义 | accelerate 的变量 | 命令行参数 |", lambda text: _translated(text, known)
    )


def _tables(top: str, head: str, translate: Callable[[str], str]) -> str:
    parts = []
    for section in (None, *SECTIONS):
        rows = [_row(key, translate) for key in KEYS if key.section == section]
        title = f"### `{section}`" if section else f"### {top}"
        parts.append("\n".join([title, "", head, "|---|---|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _translated(meaning: str, known: dict[str, str]) -> str:
    text, one_of, choices = meaning.partition(" One of ")
    chinese = TRANSLATED.get(text) or known.get(text) or known.get(text.replace("`", "")) or text
    for name in {name for name in re.findall(r"`([^`]+)`", text) if f"`{name}`" not in chinese}:
        chinese = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", f"`{name}`", chinese, flags=re.ASCII)
    return chinese + (f"可选值：{choices.removesuffix('.').replace(', ', '、')}。" if one_of else "")


def _row(key: Key, translate: Callable[[str], str]) -> str:
    default = getattr(RunConfig(), key.field)
    name = f"`{key.field}`" + (f" (accelerate: `{key.written}`)" if key.written != key.field else "")
    flags = ", ".join(f"`{flag[:2]}{flag[2:].replace('-', '_')}`" for flag in key.flags)
    variable = f"`{key.variable}`" if key.variable else ""
    shown = "" if default is None else f"`{str(default).lower()}`"
    return f"| {name} | {shown} | {translate(_meaning(key))} | {variable} | {flags} |"


def _meaning(key: Key) -> str:
    kinds = field_types(RunConfig)[key.field]
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    words = [choice for choice in choices if not choice.isdigit() or len(choices) < 5]
    text = field_docs(RunConfig)[key.field].replace("``", "`").replace("|", "\\|")
    return text + (f" One of {', '.join(f'`{word}`' for word in words)}." if words else "")


def written(page: Path = PAGE) -> str:
    text = page.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{tables() if page == PAGE else chinese_tables()}\n{text[end:]}"


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == written(), "run python tests/unit/documents/test_configuration.py"


def test_the_chinese_page_lists_the_same_settings() -> None:
    """Its wording is that of the catalogue when the page was written."""

    def rows(page: Path) -> list[list[str]]:
        table = page.read_text(encoding="utf-8").partition(BEGIN)[2]
        return [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("| `")]

    english, chinese = rows(PAGE), rows(CHINESE)
    assert [[*row[:2], *row[3:]] for row in chinese] == [[*row[:2], *row[3:]] for row in english]
    assert [row[0] for row in chinese if not re.search(r"[\u4e00-\u9fff]", row[2])] == []


def test_the_file_on_the_page_loads(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    path = tmp_path / "echelon.toml"
    path.write_text(example)
    assert {name: setting.value for name, setting in from_file(path).items()} == {
        "num_processes": 2,
        "mixed_precision": "bf16",
        "sharded_by": "fsdp",
        "fsdp_reshard_after_forward": True,
    }


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
    CHINESE.write_text(written(CHINESE), encoding="utf-8")
