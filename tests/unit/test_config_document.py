"""docs/configuration.md lists the table of settings; ``python tests/unit/test_config_document.py`` writes the list."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

from echelon.config.files import from_file
from echelon.config.key_table import KEYS, SECTIONS, Key
from echelon.config.schema import RunConfig, field_docs, field_types

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN = "<!-- settings: made by python tests/unit/test_config_document.py -->\n"
END = "<!-- end of settings -->\n"


def tables() -> str:
    parts = []
    for section in (None, *SECTIONS):
        rows = [_row(key) for key in KEYS if key.section == section]
        title = f"### `{section}`" if section else "### Top-level settings"
        head = "| setting | default | meaning | accelerate's variable | flags |\n|---|---|---|---|---|"
        parts.append("\n".join([title, "", head, *rows, ""]))
    return "\n".join(parts)


def _row(key: Key) -> str:
    default = getattr(RunConfig(), key.field)
    name = f"`{key.field}`" + (f" (accelerate: `{key.written}`)" if key.written != key.field else "")
    flags = ", ".join(f"`{flag[:2]}{flag[2:].replace('-', '_')}`" for flag in key.flags)
    variable = f"`{key.variable}`" if key.variable else ""
    shown = "" if default is None else f"`{str(default).lower()}`"
    return f"| {name} | {shown} | {_meaning(key)} | {variable} | {flags} |"


def _meaning(key: Key) -> str:
    kinds = field_types(RunConfig)[key.field]
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    words = [choice for choice in choices if not choice.isdigit() or len(choices) < 5]
    text = field_docs(RunConfig)[key.field].replace("``", "`").replace("|", "\\|")
    return text + (f" One of {', '.join(f'`{word}`' for word in words)}." if words else "")


def written() -> str:
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{tables()}\n{text[end:]}"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == written(), "run python tests/unit/test_config_document.py"


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
    PAGE.write_text(written())
