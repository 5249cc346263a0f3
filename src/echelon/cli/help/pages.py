"""Help pages: headings and options in colour, texts in the user's language, wrapped by the width of their characters."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import click
from click.shell_completion import CompletionItem

from echelon.base.messages.terminal import has_colour, num_columns, wrap
from echelon.base.messages.translation import gettext as _

_EXTRA = re.compile(r"(.*?)(\s+\[[^\]]*\])?", re.DOTALL)
_FLAG = re.compile(r"(?<![^\s/])--[a-z0-9-]+")


class HelpPage(click.HelpFormatter):
    """click's page, with colours and translations. click removes the colours if the output is not a terminal."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the first line."""
        words = " ".join(_(word) for word in args.split())
        label = _("Usage:")
        super().write_usage(prog, words, prefix or (label if label.endswith("\uff1a") else f"{label} "))

    def write_heading(self, heading: str) -> None:
        """Write the heading of a section."""
        text = _("{heading}:", heading=_(heading))
        self.write(f"{'':>{self.current_indent}}{click.style(text, bold=True)}\n")

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
            line = " ".join(paragraph.replace("\b", "").split())
            if number:
                self.write("\n")
            indent = " " * self.current_indent
            self.write("".join(f"{indent}{one}\n" for one in wrap(_(line), self.width - self.current_indent)))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write names on the left, and their descriptions on the right."""
        rows = [(_FLAG.sub(lambda flag: spelled(flag[0]), first), _description(second)) for first, second in rows]
        left = min(max((num_columns(first) for first, _ in rows), default=0), col_max) + col_spacing
        for first, second in rows:
            name = f"{'':>{self.current_indent}}{click.style(first, fg='cyan')}"
            lines = wrap(second, max(self.width - left - self.current_indent, 20))
            if not lines:
                self.write(f"{name}\n")
                continue
            gap = left - num_columns(first)
            head = f"{name}{' ' * gap}" if gap >= col_spacing else f"{name}\n{' ' * (left + self.current_indent)}"
            self.write(f"{head}{lines[0]}\n")
            self.write("".join(f"{' ' * (left + self.current_indent)}{line}\n" for line in lines[1:]))


def write_groups(
    formatter: click.HelpFormatter, groups: Mapping[str, Sequence[tuple[str, str]]], examples: Sequence[tuple[str, str]]
) -> None:
    """Write sections of options, whose descriptions begin in the same column, and command lines as examples."""
    left = min(30, max(len(names) for rows in groups.values() for names, _ in rows))
    for heading, rows in groups.items():
        with formatter.section(heading):
            formatter.write_dl([(names.ljust(left), text) for names, text in rows])
    with formatter.section("Examples"):
        for line, text in examples:
            formatter.write_text(text)
            formatter.write(f"    {line}\n")


def option_name(option: click.Parameter) -> str:
    """Return the name of the option's parameter; of ``--help``, for which versions of click differ, ``help``."""
    return "help" if "--help" in option.opts else str(option.name)


class PageContext(click.Context):
    """Context whose help is a ``HelpPage``."""

    formatter_class = HelpPage


def with_pages(command: click.Command) -> click.Command:
    """Let ``command`` and its subcommands show ``HelpPage``, and return it."""
    vars(command)["context_class"] = PageContext
    vars(command)["shell_complete"] = partial(_complete, command.shell_complete)
    for one in command.commands.values() if isinstance(command, click.Group) else ():
        # The list of a group's commands shows their whole first sentence.
        one.short_help = one.short_help or re.split(r"\n\s*\n", one.help or "")[0]
        with_pages(one)
    return command


def _complete(
    complete: Callable[[click.Context, str], list[CompletionItem]], ctx: click.Context, incomplete: str
) -> list[CompletionItem]:
    """Complete flags with ``_``, as the documents spell them, or with ``-`` if the user began so."""
    found = complete(ctx, incomplete.replace("_", "-") if incomplete.startswith("--") else incomplete)
    if not incomplete.startswith("-") or "-" in incomplete[2:]:
        return found
    for item in found:
        item.value = spelled(item.value)
    return found


def spelled(flag: str) -> str:
    """Return ``flag`` as the documents spell it, with ``_``."""
    if not flag.startswith("--"):
        return flag
    return f"--{flag[2:].replace('-', '_')}"


def page_colour() -> bool:
    """Return whether help pages on stdout have colours."""
    return has_colour(sys.stdout)


def _description(text: str) -> str:
    """Return an option's description; what click adds in brackets at the end is not in the catalogue."""
    match = _EXTRA.fullmatch(" ".join(text.split()))
    if match is None:
        return text
    # An error tells the range of a number.
    return _(match[1]) + (_(" (required)") if "[required" in (match[2] or "") else "")
