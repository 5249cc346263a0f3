"""The table of ``docs/verify.md``: what ``echelon verify`` says of each planted fault."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutants.mutant import Mutant
from tests.mutants.runner import Outcome
from tests.verify_causes import PAGE

NOT_FOUND: tuple[str, ...] = ()
"""Names of the faults that are not found within one step."""
NOT_LOCALIZED: tuple[str, ...] = ("the model left in eval mode after an evaluation",)
"""Names of the faults that are found, but at another stage or tensor."""


def table_of(outcomes: Sequence[Outcome]) -> str:
    """Return the figures and the table, in Markdown."""
    count = len(outcomes)
    found, localized = sum(one.is_found for one in outcomes), sum(one.is_localized for one in outcomes)
    late = sum(one.is_found_late for one in outcomes)
    lines = [
        f"Of {count} planted faults, {found} ({100 * found / count:.0f} %) are found within one update of their first effect and "
        f"{late} ({100 * late / count:.0f} %) within ten; for {localized} ({100 * localized / count:.0f} %) the stage and the tensor "
        "are right, too.",
        "",
        "| fault | script | layout | reference | first effect | found | stage | tensors | cause |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_row, outcomes),
    ]
    return "\n".join(lines)


def recorded_cause(mutant: Mutant) -> str:
    """Return the cause in the row of the page that has the name of ``mutant``."""
    page = PAGE.read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| {mutant.name} |"))
    return row.strip("|").rpartition("|")[2].strip()


def _row(one: Outcome) -> str:
    mutant = one.mutant
    layout = f"{mutant.world_size} processes" + (f", {mutant.engine}" if mutant.engine else "")
    reference = "the script" if mutant.against == "itself" else "the correct script"
    found = "no" if not one.is_found_late else f"update {one.update}"
    stage = one.stage if one.is_localized or not one.stage else f"{one.stage} (expected: {' or '.join(mutant.stages)})"
    names = [name.replace("|", r"\|") for name in one.tensors[:2]]
    tensors = ", ".join(f"`{name}`" for name in names) + (", ..." if len(one.tensors) > 2 else "")
    cells = (mutant.name, mutant.script, layout, reference, _update(mutant.update), found, stage, tensors, one.cause)
    return "| " + " | ".join(cells) + " |"


def _update(update: int) -> str:
    return "start" if update < 0 else f"update {update}"
