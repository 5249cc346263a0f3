"""Makes the package's description from README.md, as a package index shows it.

An index shows the README without the repository around it, so relative links would be broken there. If pyproject.toml has the
URL `Source`, they become links to the files of this version; without it, only their text remains.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!\w+:|#)[^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```\n)", re.MULTILINE | re.DOTALL)


class ReadmeHook(MetadataHookInterface):
    """Set `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `readme` to ``metadata``, the table [project] of pyproject.toml."""
        repository = str(metadata.get("urls", {}).get("Source", "")).rstrip("/")
        root = Path(self.root)
        version = re.findall(
            r'^__version__ = "(.+)"', (root / "src/echelon/_version.py").read_text(encoding="utf-8"), re.M
        )
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readme_of_index(text, repository, f"v{version[0]}"),
        }


def readme_of_index(text: str, repository: str, tag: str) -> str:
    """Return the Markdown ``text`` without relative links, outside code blocks.

    Args:
        text: the README.
        repository: URL of the repository, or "" if it has none; links are then replaced with their text, and a line that is
            nothing but a link is left out.
        tag: tag of the release.
    """

    def absolute(match: re.Match[str]) -> str:
        if not repository:
            return match["text"]
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({repository}/{kind}/{tag}/{match['path']})"

    def rewrite(part: str) -> str:
        if part.startswith("```"):
            return part
        lines = part.splitlines(keepends=True)
        return "".join(_LINK.sub(absolute, line) for line in lines if repository or not _LINK.fullmatch(line.strip()))

    return "".join(rewrite(part) for part in _FENCE.split(text))
