"""A stand-in for the package ``nltk``, whose data are downloads: a text is one sentence."""

from __future__ import annotations

from types import SimpleNamespace

data = SimpleNamespace(find=lambda name: name)


def sent_tokenize(text: str) -> list[str]:
    return [text]
