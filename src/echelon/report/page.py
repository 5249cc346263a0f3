"""Writes the report page: one HTML file without links to other files or servers."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

__all__ = ["render_page"]


def render_page(data: Mapping[str, Any], *, live_url: str | None = None) -> str:
    """Return the page as HTML.

    Args:
        data: what ``page_data`` returned.
        live_url: address on the page's own server from which the page gets new data every two seconds; None for a page that
            makes no request. A content security policy forbids all others.
    """
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    if live_url is not None:
        policy += "; connect-src 'self'"
    # "<" is escaped in the data, so that no text in it ends the script element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "policy": policy,
        "title": _escape(str(data["title"])),
        "live": "" if live_url is None else f' data-live="{_escape(live_url)}"',
        "style": _asset("uPlot.min.css") + _asset("page.css"),
        "data": text,
        "uplot": scripts[0],
        "script": scripts[1],
    }
    page = _asset("page.html")
    # One pass: a value may contain the mark of another part.
    pieces = page.split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (resources.files("echelon.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
