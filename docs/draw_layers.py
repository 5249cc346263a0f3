"""Draw the picture of architecture.md: the layers of ``src/echelon``, from the table on that page."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WIDTH, LEFT, ROW, GAP, BOXES = 960, 58, 46, 8, 440
LEVELS = {"distributed": "Level 1", "accelerator": "Level 2", "trainer": "Level 3"}
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
LIGHT = {
    "page": ("#ffffff", "#d6dae1"),
    "box": ("#f1f4f9", "#aab4c4"),
    "level": ("#d4e5ff", "#5b94e6"),
    "free": ("#cbf0db", "#3fa974"),
}
DARK = {
    "page": ("#161b24", "#333c4a"),
    "box": ("#232b38", "#566275"),
    "level": ("#1d4173", "#5b94e6"),
    "free": ("#175439", "#3fa974"),
}


def rows(page: str) -> list[tuple[int, list[str], str]]:
    """Return the layers of the page's table, the lowest first: number, folders, what they do."""
    found = re.findall(r"^\| *(\d+) *\| *((?:`\w+/` *)+)\| *(.*?) *\|$", page, re.MULTILINE)
    return [(int(number), re.findall(r"`(\w+)/`", folders), words) for number, folders, words in found]


def without_torch(page: str) -> set[str]:
    """Return the folders that the page says do not import torch."""
    (listed,) = re.findall(
        r"^The following modules do not import torch[^:]*: (.*?)\.\n\n", page, re.MULTILINE | re.DOTALL
    )
    return set(re.findall(r"`(\w+)/`", listed))


def text(x: float, y: float, words: str, *, size: float = 13, kind: str = "text", weight: int = 400) -> str:
    """Return a line of text."""
    return (
        f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size:g}" font-weight="{weight}">{escape(words)}</text>'
    )


def style() -> str:
    """Return the colours of a light page, and under a media query those of a dark one."""

    def rules(colours: dict[str, tuple[str, str]], letters: str, faint: str) -> str:
        kinds = "".join(f".{kind}{{fill:{fill};stroke:{edge}}}" for kind, (fill, edge) in colours.items())
        return f"{kinds}.text{{fill:{letters}}}.faint{{fill:{faint}}}.arrow{{stroke:{faint};fill:{faint}}}"

    light, dark = rules(LIGHT, "#1c2330", "#5c6675"), rules(DARK, "#e8ecf2", "#9aa5b5")
    return f"<style>text{{font-family:{FONT}}}{light}@media (prefers-color-scheme: dark){{{dark}}}</style>"


def draw(page: str) -> str:
    """Return the picture as SVG."""
    layers, free = rows(page), without_torch(page)
    height = 74 + len(layers) * (ROW + GAP) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="The layers of src/echelon, from cli at the top to base at the bottom">',
        style(),
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        text(24, 32, "src/echelon: each layer imports only lower layers", size=16, weight=600),
        '<rect class="level" x="24" y="44" width="12" height="12" rx="3"/>',
        text(42, 54, "the three levels that users program against", size=12, kind="faint"),
        '<rect class="free" x="320" y="44" width="12" height="12" rx="3"/>',
        text(338, 54, "does not import torch", size=12, kind="faint"),
    ]
    for place, (number, folders, words) in enumerate(reversed(layers)):
        y = 74 + place * (ROW + GAP)
        parts.append(text(26, y + 30, str(number), size=13, kind="faint", weight=600))
        width = (BOXES - GAP * (len(folders) - 1)) / len(folders)
        for i, folder in enumerate(folders):
            kind = "level" if folder in LEVELS else "free" if folder in free else "box"
            x = LEFT + i * (width + GAP)
            parts.append(f'<rect class="{kind}" x="{x:g}" y="{y}" width="{width:g}" height="{ROW}" rx="6"/>')
            parts.append(text(x + 10, y + 30, f"{folder}/", size=14, weight=600))
            if folder in LEVELS:
                parts.append(text(x + width - 62, y + 30, LEVELS[folder], size=13))
        parts += [
            text(LEFT + BOXES + 18, y + (22 if len(lines) > 1 else 30) + 17 * i, line, size=12.5)
            for lines in [_lines(re.sub(r"\*\*Level \d\*\*[:,]? *|`", "", words), 62)]
            for i, line in enumerate(lines)
        ]
    return "\n".join([*parts, "</svg>", ""])


def _lines(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines[:2]


if __name__ == "__main__":
    (DOCS / "layers.svg").write_text(draw((DOCS / "architecture.md").read_text(encoding="utf-8")), encoding="utf-8")
