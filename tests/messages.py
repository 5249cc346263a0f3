"""``python -m tests.messages`` (make messages): brings the catalogues of ``src/echelon/locale`` up to date.

New messages get an empty translation, and entries of messages that are gone are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from babel.messages.catalog import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.pofile import read_po, write_po

from echelon.base.messages.translation import LOCALES
from echelon.cli.launch_options import COMMON, EXAMPLES, GROUPS as LAUNCH_GROUPS
from echelon.cli.main import cli
from echelon.cli.verify import GROUPS
from echelon.report.page import page_texts

SOURCE = LOCALES.parent
# Sentences of click (8.1 to 8.5) on help pages.
_OF_CLICK = ("Usage:", "Options", "Commands", "[OPTIONS]", "COMMAND", "[ARGS]...", "Show this message and exit.")


def messages() -> set[str]:
    """Return all messages: those that the source marks, and the texts of help pages and of the report's page."""
    marked = extract_from_dir(SOURCE, [("**.py", "python")], keywords={"_": None, "N_": None}, comment_tags=())
    return {str(message) for _, _, message, _, _ in marked} | {*help_texts(), *page_texts()} - {""}


def help_texts() -> Iterator[str]:
    """Yield the paragraphs of the help pages, which docstrings, options and tables contain."""
    yield from _OF_CLICK
    yield from (heading for heading in (*LAUNCH_GROUPS, *COMMON, *GROUPS, "Examples") if heading)
    yield from (text for group in COMMON.values() for text in group.values())
    yield from (text for _, text in EXAMPLES)
    for command in commands(cli):
        context = click.Context(command)
        records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
        texts = [re.sub(r"\s+\[[^\]]*\]$", "", record[1]) for record in records if record is not None]
        texts += re.split(r"\n\s*\n", (command.help or "").replace("\b", ""))
        yield from filter(None, (" ".join(text.split()) for text in texts))


def commands(command: click.Command) -> Iterator[click.Command]:
    """Yield ``command`` and all commands below it."""
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below)


def catalogue(path: Path) -> Catalog:
    """Return the entries of a .po file."""
    with path.open("rb") as file:
        return read_po(file, locale=path.parents[1].name)


def main() -> None:
    """Write the catalogues."""
    template = Catalog()
    for message in messages():
        template.add(message)
    for path in LOCALES.glob("*/LC_MESSAGES/echelon.po"):
        found = catalogue(path)
        found.fuzzy = False
        found.update(template, no_fuzzy_matching=True, update_creation_date=False)
        with path.open("wb") as file:
            write_po(file, found, width=120, sort_output=True, ignore_obsolete=True)


if __name__ == "__main__":
    main()
