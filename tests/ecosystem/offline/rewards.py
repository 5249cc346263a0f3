"""A reward of trl's online trainers that is a function in Python."""

from __future__ import annotations

from typing import Any


def short_words(completions: list[str], **kwargs: Any) -> list[float]:
    """Return the share of words with two characters, such as w7, in each text."""
    return [sum(len(word) == 2 for word in text.split()) / max(1, len(text.split())) for text in completions]
