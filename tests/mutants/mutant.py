"""What is known of one planted fault: how it is planted, and what ``echelon verify`` must say."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from echelon.distributed.checks.finding import STAGES, Finding, Stage

SCRIPTS = Path(__file__).resolve().parent / "scripts"
CUT_TEXTS = (
    ("VOCABULARY, IGNORED = 24, -100", "VOCABULARY, IGNORED = 24, 0"),
    (
        """    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    labels = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    return {"input_ids": inputs, "labels": labels}
""",
        """    padded = pad_sequence(texts, batch_first=True)
    return {"input_ids": padded[:, :-1], "labels": padded[:, 1:]}
""",
    ),
)
"""Variant of ``language_model``: ``[:, :-1]`` cuts the last token of the longest text of each batch, and of no other."""
REDUCED_WHEN_CLIPPED = (
    (
        """                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
""",
        """                with accelerator.no_sync(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
""",
    ),
)
"""Variant of ``accelerated``: echelon reduces the gradients when they are clipped (step guard)."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault in a training script (``edits``), or in a library below it (``fault``)."""

    name: str
    """What is wrong, as a user would say it; unique."""
    script: str
    """Name of the base script, without ``.py``."""
    edits: tuple[tuple[str, str], ...] = ()
    """Pairs (text that occurs exactly once in the script, replacement)."""
    variant: tuple[tuple[str, str], ...] = ()
    """Edits that both the wrong and the right script have; applied first."""
    fault: str = ""
    """Name of a context manager in ``library_faults``."""
    against: Literal["itself", "correct"] = "itself"
    """What runs on one process: the same script (a fault that only ranks have), or the script without the fault (``--against``)."""
    world_size: int = 2
    engine: str | None = None
    resume: tuple[int, int] | None = None
    """Save after the first number of updates, and resume; the fault is in both parts. None: not resumed."""
    update: int
    """The first update with an effect; -1: before the first."""
    stages: tuple[Stage, ...]
    """The right stage, or stages where two name the same thing."""
    tensors: str = ""
    """Pattern of the name of one of the finding's tensors, without the model's index; empty: a stage without tensors."""
    has_probe: bool = True
    """False: ranks alone cannot show the effect, because the script without the fault has other samples."""
    effect: str = "*"
    """Pattern of the values of the probe that the fault changes first."""

    def names_tensor(self, finding: Finding) -> bool:
        """Return whether ``finding`` names the right tensor."""
        names = [name.partition(":")[2] or name for name in finding.tensors]
        if self.tensors in ("", "*") and not finding.tensors:
            return True  # all of them
        return any(fnmatchcase(name.partition("/")[0], self.tensors or "*") for name in names)


def mutant(name: str, where: str, *edits: tuple[str, str], **options: Any) -> Mutant:
    """Return a fault with these edits.

    Args:
        where: script, right stage (or stages), and first update with an effect: ``"raw_ddp: reduce or clip in update 3"``.
    """
    script, _, rest = where.partition(": ")
    stages, _, update = rest.rpartition(" in update ")
    right = tuple(STAGES[STAGES.index(stage)] for stage in stages.split(" or "))  # type: ignore[arg-type]
    return Mutant(name=name, script=script, update=int(update), stages=right, edits=edits, **options)


def mutated_text(mutant: Mutant) -> str:
    """Return the text of the script with the fault.

    Raises:
        ValueError: an edit does not fit the script.
    """
    return _edited(mutant, (*mutant.variant, *mutant.edits))


def correct_text(mutant: Mutant) -> str:
    """Return the text of the script without the fault."""
    return _edited(mutant, mutant.variant)


def _edited(mutant: Mutant, edits: tuple[tuple[str, str], ...]) -> str:
    text = (SCRIPTS / f"{mutant.script}.py").read_text(encoding="utf-8")
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{mutant.name}: {old!r} occurs {text.count(old)} times in {mutant.script}.py")
        text = text.replace(old, new)
    return text
