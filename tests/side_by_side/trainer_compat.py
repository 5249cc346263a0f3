"""Makes docs/trainer_compat.md from trainer_compat.txt, and checks that what it says is so.

``python tests/side_by_side/trainer_compat.py``: say what is wrong; ``--write``: write the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from echelon.trainer import Seq2SeqTrainingArguments, Trainer, TrainingArguments  # noqa: E402 - a program as well
from tests.side_by_side.compat import mentions, words_of_tests  # noqa: E402

DATA = Path(__file__).with_name("trainer_compat.txt")
PAGE = ROOT / "docs" / "trainer_compat.md"
FILES = {
    "arguments": "unit/test_trainer_arguments.py",
    "balanced": "unit/test_trainer_balanced_batches.py",
    "behaviours": "unit/test_trainer_behaviours.py",
    "checkpoints": "unit/test_trainer_checkpoints.py",
    "devices": "unit/test_trainer_devices.py",
    "changed_data": "unit/test_changed_data.py",
    "items": "unit/test_trainer_items.py",
    "lock": "unit/test_trainer_lock.py",
    "errors": "unit/test_trainer_errors.py",
    "exact": "unit/test_trainer_exact.py",
    "loop": "unit/test_trainer_loop.py",
    "options": "unit/test_trainer_options.py",
    "schedules": "unit/test_trainer_schedules.py",
    "services": "unit/test_trainer_services.py",
    "settings": "unit/test_trainer_settings.py",
    "ranks": "ranks/test_trainer.py",
    "ranks_deepspeed": "ranks/test_trainer_deepspeed.py",
    "ranks_items": "ranks/test_trainer_items.py",
    "ranks_options": "ranks/test_trainer_options.py",
    "ranks_resume": "ranks/test_trainer_resume.py",
    "ranks_sharded": "ranks/test_already_sharded.py",
    "exchange": "side_by_side/test_trainer_exchange.py",
    "wrong_length": "unit/test_trainer_wrong_length.py",
    "losses": "side_by_side/test_trainer_losses.py",
    "scripts": "side_by_side/test_trainer_scripts.py",
}
HEAD = """# What of transformers' Trainer is here

A script written for the Trainer of transformers 5.23 runs after `from echelon import Trainer, TrainingArguments`, and so do
tutorials for its older versions. This page lists every setting, every method and the behaviours that scripts rely on: the
test of each, and where it differs on purpose.

Made by `python tests/side_by_side/trainer_compat.py --write` from `tests/side_by_side/trainer_compat.txt`; a test holds the
two together. Tests are in `tests/`:
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    section: str
    number: str
    about: str
    """Names with spaces between; a sentence begins with a colon in the data."""
    names: tuple[str, ...]
    where: str
    difference: str

    @property
    def is_later(self) -> bool:
        return self.where.startswith("later: ")

    @property
    def tests(self) -> list[str]:
        return [] if self.is_later else self.where.split()


def rows() -> list[Row]:
    found: list[Row] = []
    section, count = "", 0
    for line in DATA.read_text().splitlines():
        if line.startswith("## "):
            section, count = line[3:], 0
        elif line and not line.startswith("#"):
            count += 1
            about, where, difference = (part.strip() for part in line.split("|"))
            first = section.partition(" ")[0]
            found.append(
                Row(
                    section=section,
                    number=f"{first if first[0].isdigit() else 'E'}.{count}",
                    about=about.removeprefix(":"),
                    names=() if about.startswith(":") else tuple(about.split()),
                    where=where,
                    difference=difference,
                )
            )
    return found


def problems(table: list[Row]) -> Iterator[str]:
    """Say what is wrong: tests that are not there or do not name what they stand for, names that are nowhere."""
    for row in table:
        words: set[str] = set()
        for test in row.tests:
            short, _, name = test.partition("::")
            known = words_of_tests(FILES[short]) if short in FILES else {}
            if name not in known:
                yield f"{row.number}: there is no test {test}"
            words |= known.get(name, set())
        if not row.tests and not row.is_later:
            yield f"{row.number}: no test"
        if row.tests:
            yield from (
                f"{row.number}: its tests do not mention {name}" for name in row.names if not mentions(name, words)
            )
    listed = {name for row in table for name in row.names}
    expected = {item.name for item in fields(Seq2SeqTrainingArguments)} | {
        name for kind in (Trainer, TrainingArguments) for name, value in vars(kind).items() if _is_public(name, value)
    }
    if missing := expected - listed - _INNER:
        yield f"not listed: {', '.join(sorted(missing))}"


# Attributes and properties that are no entry of their own.
_INNER = frozenset({"batches_of", "ddp_timeout_delta", "distributed_state", "logging_dir", "place_model_on_device"})


def _is_public(name: str, value: object) -> bool:
    return not name.startswith("_") and (callable(value) or isinstance(value, (property, staticmethod)))


def page(table: list[Row]) -> str:
    later = [row for row in table if row.is_later]
    lines = [HEAD, ", ".join(f"{short} = `{file}`" for short, file in FILES.items()) + ".", ""]
    lines += [f"{len(table)} rows" + (f"; {len(later)} of them come later." if later else "."), ""]
    for section in dict.fromkeys(row.section for row in table):
        lines += [f"## {section}", "", "| | what | test, or where it comes | differs on purpose |", "|---|---|---|---|"]
        for row in (row for row in table if row.section == section):
            about = ", ".join(f"`{name}`" for name in row.names) or row.about
            where = "<br>".join(f"`{test}`" for test in row.tests) or row.where
            lines.append(f"| {row.number} | {about} | {where} | {row.difference} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/trainer_compat.md")
    options = parser.parse_args()
    table = rows()
    wrong = list(problems(table))
    print("\n".join(wrong))
    if options.write:
        PAGE.write_text(page(table))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
