"""The first screen of ``echelon verify``: the same run or not, and if not, the first difference and its remedy."""

from __future__ import annotations

import linecache
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echelon.base.messages.terminal import num_columns, pad, wrap
from echelon.base.printable import printable
from echelon.distributed.checks.finding import Finding, Stage
from echelon.verify.command.layouts import Layout
from echelon.verify.command.run_layouts import RunFailure
from echelon.verify.command.verification import LayoutResult, Verification
from echelon.verify.finding import Verdict

REMARK = "Note: this differs from one process, but is just as correct, so the result above does not include it; a change is optional"
_NO_USER_CODE = "(the Trainer runs this stage; no code of the script takes part in it)"
_TRAIN = re.compile(r"(?<!model)\.train\(")
_MAX_SOURCE = 100
_LABEL_WIDTH = 9
_MAX_TENSORS = 3
_MAX_RANKS = 8
_MAX_ALSO = 2
_MAY_BE_ABSENT: tuple[Stage, ...] = ("load", "rng", "clip", "buffers", "save")
"""Stages that many correct scripts do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Escape sequences; all empty if the output has no colours."""

    good: str = ""
    bad: str = ""
    unknown: str = ""
    bold: str = ""
    dim: str = ""
    reset: str = ""

    @classmethod
    def for_terminal(cls) -> Palette:
        """Return the colours."""
        return cls(
            good="\x1b[1;32m", bad="\x1b[1;31m", unknown="\x1b[1;33m", bold="\x1b[1m", dim="\x1b[2m", reset="\x1b[0m"
        )

    def of(self, outcome: str) -> str:
        """Return the colour of an outcome."""
        return {"same": self.good, "different": self.bad}.get(outcome, self.unknown)


def render(found: Verification, *, palette: Palette, width: int) -> str:
    """Return the screen, which ends with a line break."""
    return "\n".join(line.rstrip() for line in _lines(found, palette, max(width, 60))) + "\n"


def headline(found: Verification) -> str:
    """Return the first line."""
    script = os.path.basename(found.plan.script)
    outcomes = [one.outcome for one in found.layouts]
    compared = "one process" if found.plan.against is None else os.path.basename(found.plan.against)
    if not outcomes:
        return f"Could not run: {script} fails on one process."
    if found.repeated is not None:
        return f"Not comparable: {script} does not repeat itself. Two runs on one process already differ."
    num_different = outcomes.count("different")
    if num_different:
        of = f"{num_different} of {len(outcomes)} layouts differ{'s' if num_different == 1 else ''}"
        if len(outcomes) == 1:
            of = f"training on {found.layouts[0].layout.name} differs"
        return f"Not the same run: {of} from {compared}."
    if set(outcomes) == {"same"}:
        processes = _and([str(n) for n in dict.fromkeys(one.layout.num_processes for one in found.layouts)])
        updates = min(one.num_updates for one in found.layouts)
        noun = "process" if processes == "1" else "processes"
        return f"The same run: {_count(updates, 'update')} of {script} on {processes} {noun} train{'s' * (updates == 1)} as {compared}."
    num_failed = len([one for one in outcomes if one != "same"])
    return f"Could not verify {num_failed} of {len(outcomes)} layouts." if len(outcomes) > 1 else "Could not verify."


def summary_of(one: LayoutResult) -> str:
    """Return what was found on a layout, as a few words."""
    if one.outcome == "failed":
        return "could not run" + (f" {one.phase}" if one.phase else "")
    assert one.verdict is not None
    if one.outcome == "not comparable":
        return "not comparable"
    if one.outcome == "different":
        finding = one.verdict.finding
        return "differs" if finding is None else f"differs: {place_of(finding)}"
    return f"same, {_closeness(one.verdict)}"


def shown_line(line: str) -> str:
    """Return ``file:line`` relative to the current folder, and the source; in words, if only a Trainer's own code runs there."""
    name, _, number = line.rpartition(":")
    if not name or not number.isdigit():
        return printable(line)
    near = os.path.relpath(name) if os.path.isabs(name) else name
    source = linecache.getline(name, int(number)).strip()
    source = source if len(source) <= _MAX_SOURCE else f"{source[:_MAX_SOURCE]} ..."
    place = f"{name if near.startswith('..') else near}:{number}"
    shown = printable(f"{place}: {source}" if source else place)
    return f"{shown} {_NO_USER_CODE}" if _TRAIN.search(source) else shown


def _lines(found: Verification, palette: Palette, width: int) -> Iterator[str]:
    outcome = {0: "same", 1: "different"}.get(found.exit_code, "failed")
    colour = palette.unknown if found.repeated is not None else palette.of(outcome)
    yield f"{colour}{printable(headline(found))}{palette.reset}"
    if found.reference_failure is not None and found.reference_failure.failure is not None:
        yield ""
        yield from _failure(found.reference_failure.failure, found.reference_failure.request.name, palette, width)
        return
    yield ""
    names = max(num_columns(one.layout.name) for one in found.layouts)
    for one in found.layouts:
        mark = palette.of(one.outcome)
        updates = (
            "the engine is not used" if one.is_copy else f"{_count(one.num_updates, 'update')}, {one.seconds:.1f} s"
        )
        summary = f"{mark}{pad(summary_of(one), 40)}{palette.reset}"
        yield f"  {pad(one.layout.name, names)}  {summary}  {palette.dim}{updates}{palette.reset}"
    if found.repeated is not None:
        yield from _repetition(found.repeated, palette, width)
        return
    for group in _groups(found.layouts):
        yield ""
        yield from _group(group, palette, width)
    yield from _remarks(found, palette, width)
    limits = list(_limits(found))
    if limits:
        yield ""
    for line in limits:
        yield from _wrapped(line, palette, width)


def _groups(results: Sequence[LayoutResult]) -> Iterator[list[LayoutResult]]:
    """Yield the results that are not the same run, those with one explanation together."""
    found: dict[object, list[LayoutResult]] = {}
    for one in results:
        if one.outcome != "same":
            found.setdefault(_explanation(one), []).append(one)
    yield from sorted(found.values(), key=lambda group: group[0].outcome != "different")


def _explanation(one: LayoutResult) -> object:
    if one.failure is not None:
        return one.failure.what
    finding = None if one.verdict is None else one.verdict.finding
    if finding is not None:
        return finding.update, finding.stage, finding.cause, finding.line, tuple(finding.tensors[:1])
    return one.verdict.reason if one.verdict is not None else one.layout


def _group(group: Sequence[LayoutResult], palette: Palette, width: int) -> Iterator[str]:
    first = group[0]
    others = f"(the same on {_join_names([one.layout for one in group[1:]])})" if len(group) > 1 else ""
    others = f" {others}" if others else ""
    if first.failure is not None:
        yield from _failure(first.failure, f"{first.layout.name}{others}", palette, width)
        if first.verdict is None or first.verdict.finding is None:
            return
        yield ""
    assert first.verdict is not None
    if first.verdict.finding is None:
        yield from _paragraph("", f"{first.layout.name}{others}: {first.verdict.reason}", palette, width)
        return
    yield f"{palette.bold}First difference on {first.layout.name}{palette.reset}{others}"
    yield from _finding(first.verdict.finding, palette, width)
    for also in first.verdict.also[:_MAX_ALSO]:
        yield ""
        yield f"{palette.bold}Another difference, which does not follow from the first{palette.reset}"
        yield from _finding(also, palette, width)
    if (more := len(first.verdict.also) - _MAX_ALSO) > 0:
        yield from _paragraph("", f"and {_count(more, 'other difference')}; --html FILE shows them", palette, width)


def _remarks(found: Verification, palette: Palette, width: int) -> Iterator[str]:
    """Yield what differs from one process without making it another run, once for all layouts."""
    verdicts = [one.verdict for one in found.layouts if one.verdict is not None and not one.is_copy]
    remarks = {(one.cause, one.do): one for verdict in reversed(verdicts) for one in verdict.remarks}
    for one in remarks.values():
        yield ""
        yield f"{palette.bold}{REMARK}{palette.reset}"
        yield from _finding(one, palette, width)


def _finding(one: Finding, palette: Palette, width: int) -> Iterator[str]:
    yield from _paragraph("what:", one.what, palette, width)
    yield from _paragraph("where:", _where(one), palette, width)
    if one.tensors:
        more = len(one.tensors) - _MAX_TENSORS
        names = ", ".join(one.tensors[:_MAX_TENSORS]) + (f" and {_count(more, 'other')}" if more > 0 else "")
        yield from _paragraph("tensors:" if len(one.tensors) > 1 else "tensor:", names, palette, width)
    if size := size_of(one):
        yield from _paragraph("size:", size, palette, width)
    if one.line:
        yield from _paragraph("line:", shown_line(one.line), palette, width)
    yield from _paragraph("cause:", cause_of(one), palette, width)
    if one.do:
        yield from _paragraph("do:", one.do, palette, width)


def cause_of(one: Finding) -> str:
    """Return the cause and its reasons."""
    parts = [part for part in (one.cause, one.why) if part] or ["none of the known causes explains these values"]
    return ": ".join(parts)


def _failure(failure: RunFailure, name: str, palette: Palette, width: int) -> Iterator[str]:
    yield f"{palette.bold}{name}:{palette.reset} {failure.what}"
    yield from (f"  {line}" if not line.startswith("  ") else line for line in failure.details)
    if failure.do:
        yield from _paragraph("do:", failure.do, palette, width)
    if failure.output:
        yield from _paragraph("output:", failure.output, palette, width)


def _repetition(first: Finding, palette: Palette, width: int) -> Iterator[str]:
    yield ""
    yield f"{palette.bold}First difference between two runs on one process{palette.reset}"
    yield from _paragraph("what:", first.what, palette, width)
    yield from _paragraph("where:", _where(first), palette, width)
    if first.line:
        yield from _paragraph("line:", shown_line(first.line), palette, width)
    do = (
        "make the script repeat itself: seed every random number generator that it creates, and leave out what depends on "
        "the time or on files of an earlier run (write to a folder with {layout} in its name)"
    )
    yield from _paragraph("do:", do, palette, width)


def _limits(found: Verification) -> Iterator[str]:
    """Yield what was not compared, and why: stages that the script does not have in one line, all else in sentences."""
    if found.float64_failure is not None:
        yield (
            f"The reference run fails in float64 ({found.float64_failure.what}), so the bounds for rounding errors are computed from the "
            "dtype and the number of additions."
        )
    verdicts = [one.verdict for one in found.layouts if one.verdict is not None and not one.is_copy]
    covers = [cover for verdict in verdicts for cover in verdict.coverage]
    seen = {cover.stage for cover in covers if cover.num_compared}
    absent = [stage for stage in _MAY_BE_ABSENT if stage not in seen and any(cover.stage == stage for cover in covers)]
    groups: dict[tuple[str, str], list[str]] = {}
    for cover in covers:
        for text in cover.missing if cover.stage not in absent else ():
            subject, _, reason = text.rpartition(": ")
            groups.setdefault((cover.stage, reason), []).append(subject)
    for (stage, reason), subjects in groups.items():
        names = list(dict.fromkeys(filter(None, subjects)))
        more = f" and {_count(len(names) - 1, 'other')}" if len(names) > 1 else ""
        yield f"Not compared: {stage}: {f'{names[0]}{more}: ' if names else ''}{reason}"
    yield from dict.fromkeys(note for verdict in verdicts for note in verdict.notes)
    if absent:
        reasons = {cover.stage: cover.missing for cover in covers if cover.missing}
        parts = [(stage, next(iter(reasons.get(stage, [])), "")) for stage in absent]
        yield f"Not compared: {'; '.join(f'{stage} ({reason})' for stage, reason in parts)}."


def place_of(one: Finding) -> str:
    """Return the update and the stage."""
    return f"update {one.update}, {one.stage}" if one.update >= 0 else f"before the first update, {one.stage}"


def _where(one: Finding) -> str:
    place, ranks = place_of(one), _ranks(one.ranks) if one.ranks else ""
    return ", ".join(filter(None, (place, ranks)))


def _ranks(ranks: Sequence[int]) -> str:
    shown = _and([str(rank) for rank in ranks[:_MAX_RANKS]])
    more = f" and {len(ranks) - _MAX_RANKS} others" if len(ranks) > _MAX_RANKS else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"


def size_of(one: Finding) -> str:
    """Return the size of the difference, of what it is, and what it was compared with."""
    parts = []
    if one.difference is not None:
        of = f" of {one.measured}" if one.measured else ""
        parts.append(f"relative difference{of}: {one.difference:.2g}")
    if one.allowed is not None:
        parts.append("the bits must be equal" if one.allowed == 0 else f"bound for rounding errors: {one.allowed:.2g}")
    if one.ratio is not None:
        parts.append(f"{one.ratio:.4g} times the value of the reference run")
    return "; ".join(parts)


def _closeness(verdict: Verdict) -> str:
    cells = [cell for cell in verdict.cells if cell.state in ("equal bits", "within rounding")]
    if cells and all(cell.state == "equal bits" for cell in cells):
        return "bit for bit"
    largest = max((cell.largest for cell in cells), default=0.0)
    return f"within rounding ({largest:.0%} of the bound)" if largest else "within rounding"


def _paragraph(label: str, text: str, palette: Palette, width: int) -> Iterator[str]:
    indent = " " * (2 + _LABEL_WIDTH) if label else "  "
    lines = _wrap(printable(text), width - len(indent)) or [""]
    head = f"  {palette.bold}{label}{palette.reset}{pad(label, _LABEL_WIDTH)[len(label) :]}" if label else "  "
    yield head + lines[0]
    yield from (indent + line for line in lines[1:])


def _wrapped(text: str, palette: Palette, width: int) -> Iterator[str]:
    for line in _wrap(printable(text), width):
        yield f"{palette.dim}{line}{palette.reset}"


def _wrap(text: str, width: int) -> list[str]:
    if not text.isascii():
        return wrap(text, width)
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _join_names(layouts: Sequence[Layout]) -> str:
    return (
        _and([layout.name for layout in layouts], separator="; ")
        if len(layouts) < 4
        else f"{len(layouts)} other layouts"
    )


def _and(words: Sequence[str], *, separator: str = ", ") -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{separator.join(words[:-1])} and {words[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
