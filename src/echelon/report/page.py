"""Writes the report page: one HTML file without links to other files or servers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from echelon.base.messages.translation import gettext as _, language, messages_of


def render_page(data: Mapping[str, Any], *, live_url: str | None = None) -> str:
    """Return the page as HTML.

    Args:
        data: what ``page_data`` returned.
        live_url: address on the page's own server from which the page gets new data every two seconds; None for a page that
            makes no request. A content security policy forbids all others.
    """
    return _render(data, asset("page.js"), live_url=live_url)


def render_plan_page(data: Mapping[str, Any]) -> str:
    """Return the page of a plan as HTML, from what ``plan_page_data`` returned."""
    return _render(data, asset("plan.js"), live_url=None)


def _render(data: Mapping[str, Any], script: str, *, live_url: str | None) -> str:
    scripts = [asset("uPlot.iife.min.js"), asset("elements.js") + script]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    if live_url is not None:
        policy += "; connect-src 'self'"
    # "<" is escaped in the data, so that no text in it ends the script element.
    with_texts = {**data, "texts": _translations()}
    text = json.dumps(with_texts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "policy": policy,
        "lang": _LANGUAGES.get(language() or "", "en"),
        "title": _escape(str(data["title"])),
        **{name: _escape(_(text)) for name, text in _HTML_TEXTS.items()},
        "live": "" if live_url is None else f' data-live="{_escape(live_url)}"',
        "style": asset("uPlot.min.css") + asset("page.css"),
        "data": text,
        "uplot": scripts[0],
        "script": scripts[1],
    }
    page = asset("page.html")
    # One pass: a value may contain the mark of another part.
    pieces = page.split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


_LANGUAGES = MappingProxyType({"zh_CN": "zh-CN"})
_HTML_TEXTS = MappingProxyType(
    {
        "report": "echelon report",
        "skip": "Skip to the report",
        "sections": "Sections",
        "noscript": "This page draws its plots with a script inside this file. Scripts are turned off.",
    }
)
# What page.js shows besides the sentences in it: the names of phases, of parts of the wall time, events, outcomes and facts.
_NAMES = [
    "forward",
    "backward",
    "optimizer",
    "rest of the loop",
    "communication",
    "wait for slower ranks",
    "data wait",
    "evaluation",
    "checkpoint",
    "whole step",
    "compute",
    "program",
    "init",
    "restart",
    "lost steps",
    "detection",
    "end",
    "stop",
    "failure",
    "stall",
    "straggler",
    "preemption",
    "running",
    "succeeded",
    "failed",
    "preempted",
    "interrupted",
    "ended without a record",
    "horizontal axis",
    "configuration",
    "output",
    "output of",
    "hyperparameters",
    "training",
    "training arguments",
    "name",
    "tags",
    "speed",
    "results",
    "command",
    "code",
    "machine",
    "versions",
    "settings",
    "outcome",
    "duration",
    "restarts",
    "steps",
    "last loss",
    "largest memory of a rank",
    "goodput",
    "script",
    "arguments",
    "launcher",
    "working directory",
    "branch",
    "processes",
    "machines",
    "host",
    "system",
    "processor",
    "CPU cores",
    "memory (MB)",
    "memory",
    "accelerators",
    "began",
    "ended",
    "exit code",
    "folder",
    "commit",
]
_SENTENCE = re.compile(r"""\bt\((?:[^"()]*\? )?"((?:[^"\\]|\\.)*)"(?: : "((?:[^"\\]|\\.)*)")?""")
_COUNTED = re.compile(r"""\bcount\([^"]*"([^"]*)", "([^"]*)"\)""")


def page_texts() -> list[str]:
    """Return the sentences and names that the pages and their scripts show, in English, with ``{name}`` for values."""
    script = asset("page.js") + asset("plan.js")
    found = [text for pair in [*_SENTENCE.findall(script), *_COUNTED.findall(script)] for text in pair if text]
    return list(dict.fromkeys((*found, *_NAMES, *_HTML_TEXTS.values())))


def asset(name: str) -> str:
    """Return the text of a file in the folder ``assets``."""
    return (resources.files("echelon.report") / "assets" / name).read_text(encoding="utf-8")


def _translations() -> dict[str, str]:
    """Return the texts of the scripts in the user's language; empty in English."""
    code = language()
    messages = {} if code is None else messages_of(code)
    return {text: messages[text] for text in page_texts() if text in messages}


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
