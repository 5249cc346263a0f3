"""Message catalogues in gettext's format, and translation of finished messages by their templates.

The source builds messages with f-strings, so that a message is known only when it is complete. A catalogue therefore contains
templates (``{number} processes on {cores} cores``), and a finished message is matched with them when it is displayed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import final

_ENTRY = re.compile(r'^msgid (".*"(?:\n".*")*)\nmsgstr (".*"(?:\n".*")*)', re.MULTILINE)
_FIELD = re.compile(r"\{\{|\}\}|\{(\w*)\}")
# Labels of lines in errors and reports, and the lines that they start.
_LABEL = re.compile(r"(\s*(?:echelon: )?)((?:where|do|logs|others|stacks|note|warning):)( +)(.*)", re.DOTALL)
_WORD = "name"
"""The placeholder ``{name}`` stands for a value without spaces."""
_FOREIGN = frozenset({"message", "error"})
"""Placeholders for a text that is not echelon's: ``{message}`` is never translated, ``{error}`` if it can be."""
_CODE = frozenset({"command", "same", "calls", "parts", "step_part"})
"""Placeholders for code, command lines and collectives, which are not English even if they look like it."""
_SHORT = frozenset({"duration", "state", "waiters", "later", "part", "origin"})
"""Placeholders whose values are translated even if they are short."""
_RANKS = re.compile(r"(ranks? )(\d[\d, -]*(?:, \.\.\.)?) (\D.*)")
"""What ranks do, as in ``others: ranks 0-2 then lost contact``."""
_RANK_LINE = re.compile(
    r"(ranks? \d[\d, -]*(?:, \.\.\.)?): (.*?)(?:(?:; |(?<=: ))(at|last seen at) (an unknown line|\S+:\d+(?:: .*)?))?",
    re.DOTALL,
)
"""What a rank does in a stall report: its state, operation, step and phase, and line."""
_NUMBERS = frozenset({"number", "count", "cores", "port", "pid", "seconds"})
_FORMS = MappingProxyType(
    {
        "is": "(is|are)",
        "has": "(has|have)",
        "was": "(was|were)",
        "does": "(does|do)",
        "it": "(it is|they are)",
        "ranks": r"(ranks? \d[\d, -]*(?:, \.\.\.)?)",
        "duration": r"([\d.]+ (?:second|minute|hour)s?)",
    }
)
"""What other placeholders stand for: forms of an English word, and what echelon formats."""
_STEP_PART = re.compile(r"(?:^|(?<=, ))[a-z]+(?= \d)")
"""A part of a step in a list such as ``data 0.1, forward 0.4 (rank 1) / 0.5 / 0.6 (rank 0)``."""
_MIN_VALUE = 12
"""Only a placeholder's value of at least this length may itself be a message, unless it is English."""
_MIN_LETTERS = 12
"""The values of a template with fewer fixed letters are single words or lists of them."""
_VERBATIM = re.compile(
    r"""(?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*"|`[^`\n]*`|(?<![\w/.])echelon (?:submit )?[a-z]+\b|--[\w-]+(?: [a-z]+)?"""
)
_LETTER = re.compile("[A-Za-z]")
_PLAIN = re.compile(
    r"""\s*(?:'[^'\n]*'|"[^"\n]*"|rank \d+|[^\s,;]*)(?:(?:, | and | or )(?:'[^'\n]*'|"[^"\n]*"|rank \d+|[^\s,;]+))*"""
)
_ENGLISH_WORD = re.compile(r"\(?([A-Za-z][a-z]*(?:[-'][a-z]+)*)([,;:.?!)]*)")
_FUNCTION_WORDS = frozenset(
    {
        *("a", "an", "are", "as", "at", "be", "but", "by", "for", "from", "has", "have", "in", "is", "it", "its"),
        *("not", "of", "on", "one", "than", "that", "the", "these", "this", "to", "was", "were", "with"),
    }
)


def read_po(text: str) -> dict[str, str]:
    """Return msgid -> msgstr for the entries of a .po file that are translated and not fuzzy."""
    entries: dict[str, str] = {}
    for block in text.split("\n\n"):
        found = None if "#, fuzzy" in block else _ENTRY.search(block)
        if found is not None:
            msgid, msgstr = ("".join(map(json.loads, part.split("\n"))) for part in found.groups())
            entries[msgid] = msgstr
    return {msgid: msgstr for msgid, msgstr in entries.items() if msgid and msgstr}


def placeholders(template: str) -> list[str]:
    """Return the names of the placeholders in ``template``, in order."""
    return [match[1] for match in _FIELD.finditer(template) if match[1] is not None]


@dataclass(slots=True, eq=False)
class _Template:
    msgid: str
    msgstr: str
    longest: str
    """The longest part between placeholders: a message without it cannot match."""
    pattern: re.Pattern[str] | None = field(default=None)

    def match(self, text: str) -> list[str] | None:
        if self.longest not in text:
            return None
        if self.pattern is None:
            self.pattern = re.compile("".join(_patterns(self.msgid)))
        found = self.pattern.fullmatch(text)
        return None if found is None else list(found.groups())

    def accepts(self, values: Mapping[str, str], translated: Mapping[str, str]) -> bool:
        """Return whether no value contains English that would stay in the translation, and none matches by coincidence."""
        is_short = len(_LETTER.findall("".join(_pieces(self.msgid)))) < _MIN_LETTERS
        kept = set(placeholders(self.msgstr))
        for name, value in values.items():
            if name not in kept:
                continue  # a word that only English needs
            if name in _FOREIGN or name in _CODE or translated[name] != value:
                continue
            if _is_english(value) or (is_short and not _PLAIN.fullmatch(value)):
                return False
        return True


@final
class Catalogue:
    """Translations of messages.

    Args:
        entries: template in English -> template in the other language, both with ``{name}`` for values.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        self.entries: Mapping[str, str] = dict(entries)
        """The templates, as in the file."""
        self._exact = {_unescape(key): _unescape(value) for key, value in entries.items() if not placeholders(key)}
        templates = [
            _Template(key, value, max(_pieces(key), key=len)) for key, value in entries.items() if placeholders(key)
        ]
        # A template with more fixed text is the more specific one.
        self._templates = sorted(templates, key=lambda one: -len("".join(_pieces(one.msgid))))

    def translate(self, text: str) -> str:
        """Return the translation of ``text``, or ``text`` itself if no entry matches all of it."""
        exact = self._exact.get(text)
        if exact is not None:
            return exact
        for template in self._templates:
            values = template.match(text)
            if values is not None:
                named = dict(zip(placeholders(template.msgid), values))
                filled = {name: self._value(name, value) for name, value in named.items()}
                if template.accepts(named, filled):
                    return _fill(template.msgstr, filled)
        return text

    def translate_lines(self, text: str) -> str:
        """Return ``text`` with each line translated; labels such as ``do:`` are translated separately."""
        # A label first: it must not become part of the first value of a template.
        if _LABEL.fullmatch(text) and "\n" not in text and (line := self._line(text)) != text:
            return line
        whole = self.translate(text)
        if whole != text:
            return whole
        return "\n".join(map(self._line, text.split("\n")))

    def _line(self, line: str) -> str:
        label = _LABEL.fullmatch(line)
        if label is not None:
            indent, name, _, rest = label.groups()
            parts = {"where:": self._place, "others:": self._others}.get(name, self.translate)
            translated = parts(rest)
            # A label in Chinese before a sentence in English would be a mixture.
            return line if translated == rest and _is_english(rest) else f"{indent}{self.translate(name)}{translated}"
        rest = line.lstrip()
        indent = line[: len(line) - len(rest)]
        if (state := self._rank_line(rest)) is not None:
            return f"{indent}{state}"
        prefix = "echelon: " if rest.startswith("echelon: ") else ""
        return f"{indent}{prefix}{self.translate(rest[len(prefix) :])}"

    def _place(self, where: str) -> str:
        whole = self.translate(where)
        if whole != where:
            return whole
        parts = [(part, self.translate(part)) for part in where.split(", ")]
        is_mixed = any(part == translated and _is_english(part) for part, translated in parts)
        comma = "\uff0c" if any(part != translated for part, translated in parts) else ", "
        return where if is_mixed else comma.join(translated for _, translated in parts)

    def _others(self, text: str) -> str:
        whole = self.translate(text)
        if whole != text:
            return whole
        found = []
        for part in text.split("; "):
            match = _RANKS.fullmatch(part)
            translated = part if match is None else self.translate(match[3])
            if match is None or translated == match[3]:
                return text
            found.append(f"rank {match[2]} {translated}")
        return "\uff1b".join(found)

    def _rank_line(self, text: str) -> str | None:
        """Return a line of a stall report, such as ``rank 1: in gather of float32[4]; step 3, training; at train.py:7: x = y``.

        None if it is another line, or if a part of it is not in the catalogue.
        """
        match = _RANK_LINE.fullmatch(text)
        if match is None:
            return None
        ranks, states, kind, place = match.groups()
        parts = [self._rank_state(state) for state in states.split("; ") if state]
        if place is not None:
            where = self.translate(place)
            is_known = where != place or not _is_english(place.partition(":")[0])
            parts.append(self._format(f"{kind} {{place}}", place=where) if is_known else None)
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts):
            return None
        return f"{re.sub('^ranks', 'rank', ranks)}\uff1a" + "\uff1b".join(found)

    def _rank_state(self, state: str) -> str | None:
        """Return a rank's state or operation, or None if it is not in the catalogue."""
        if match := re.fullmatch(r"in (\S.*)", state):
            is_prose = match[1].startswith("another ") or " at " in match[1]
            return None if is_prose else self._format("in {calls}", calls=match[1])
        if match := re.fullmatch(r"exited \(code (-?\d+)\)", state):
            return self._format("exited (code {number})", number=match[1])
        if match := re.fullmatch(r"(step \d+)(?:, (.+))?", state):
            phase = "" if match[2] is None else self.translate(match[2])
            return None if match[2] and phase == match[2] else "\uff0c".join(filter(None, (match[1], phase)))
        translated = self.translate(state)
        return None if translated == state else translated

    def _format(self, key: str, **values: str) -> str | None:
        """Return a part of a rank's line; its entry has a prefix, because as a template it would match any sentence."""
        template = self.entries.get(f"state: {key}")
        return None if template is None else _fill(template, values)

    def _step_part(self, name: str) -> str:
        """Return a part of a step, such as ``data``; as an entry of its own, it would match values of other messages."""
        return self.entries.get(f"part: {name}", name)

    def _value(self, name: str, value: str) -> str:
        if name == "items":
            return "\uff0c".join(map(self.translate, value.split(", ")))
        if name == "parts":
            return _STEP_PART.sub(lambda found: self._step_part(found[0]), value)
        if name == "step_part":
            return self._step_part(value)
        if name in _SHORT:
            return self.translate(value)
        if re.fullmatch(r"ranks \d[\d, -]*(?:, \.\.\.)?", value):
            return value.replace("ranks ", "rank ", 1)
        if name == "message" or name in _CODE or (len(value) < _MIN_VALUE and not _is_english(value)):
            return value
        return self.translate(value)


def _patterns(template: str) -> Iterator[str]:
    for piece, name in zip(_pieces(template), [*placeholders(template), None]):
        yield re.escape(piece)
        if name in _NUMBERS or (name == "rank" and piece.endswith("rank ")):
            yield r"(-?\d[\d.,e+-]*?)"
        elif name is not None and name in _FORMS:
            yield _FORMS[name]
        elif name is not None:
            yield r"(\S+?)" if name == _WORD else "(.*?)"  # a value is part of one line


def _pieces(template: str) -> list[str]:
    """Return the fixed parts of ``template`` around its placeholders."""
    pieces, end = [""], 0
    for match in _FIELD.finditer(template):
        pieces[-1] += template[end : match.start()]
        end = match.end()
        if match[1] is None:
            pieces[-1] += match[0][0]
        else:
            pieces.append("")
    pieces[-1] += template[end:]
    return pieces


def _unescape(template: str) -> str:
    return _pieces(template)[0] if not placeholders(template) else template


def _fill(template: str, values: Mapping[str, str]) -> str:
    return "".join(_filled(template, values))


def _filled(template: str, values: Mapping[str, str]) -> Iterator[str]:
    for piece, name in zip(_pieces(template), [*placeholders(template), None]):
        yield piece
        if name is not None:
            yield values[name]


def _is_english(text: str) -> bool:
    """Return whether ``text`` contains words of an English sentence, rather than only names, paths, numbers and quoted values."""
    before = ""  # the word before, if no punctuation follows it
    for token in _VERBATIM.sub("''", text).split():
        match = _ENGLISH_WORD.fullmatch(token)
        word = match[1] if match is not None else ""
        if word in _FUNCTION_WORDS or (before and word and word.islower()):
            return True
        before = word if match is not None and not match[2] else ""
    return False
