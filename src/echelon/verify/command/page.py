"""The page of ``echelon verify --html``: one row an update, one column a stage, in one file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib import resources
from types import MappingProxyType

from echelon._version import __version__
from echelon.base.printable import printable
from echelon.distributed.checks.finding import STAGES, Finding
from echelon.verify.command.run_layouts import RunFailure
from echelon.verify.command.terminal_output import (
    REMARK,
    cause_of,
    headline,
    place_of,
    shown_line,
    size_of,
    summary_of,
)
from echelon.verify.command.verification import LayoutResult, Verification
from echelon.verify.finding import Cell, Verdict

_MARKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "equal bits": ("bits", "="),
        "within rounding": ("near", "\u2248"),
        "different": ("diff", "\u2260"),
        "not compared": ("none", ""),
    }
)
"""State of a cell -> its class and its text."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_verification(found: Verification) -> str:
    """Return the page as HTML, in the user's language."""
    style = (resources.files("echelon.verify.command") / "page.css").read_text(encoding="utf-8")
    title = headline(found)
    outcome = {0: "same", 1: "different"}.get(found.exit_code, "unknown")
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{style}</style></head>\n<body><main>\n"
        f'<header><p class="brand">echelon verify</p><h1 class="{outcome}">{_text(title)}</h1>{_facts(found)}</header>\n'
        f"{''.join(_body(found))}</main></body></html>\n"
    )


def _body(found: Verification) -> Iterator[str]:
    if found.reference_failure is not None and found.reference_failure.failure is not None:
        yield f"<section><h2>{_text('One process')}</h2>{_failure(found.reference_failure.failure)}</section>\n"
        return
    if found.repeated is not None:
        title = _text("First difference between two runs on one process")
        yield f"<section><h2>{title}</h2>{_finding(found.repeated)}</section>\n"
    if len(found.layouts) > 1:
        links = (
            f'<tr><th scope="row"><a href="#{_text(one.layout.slug)}">{_text(one.layout.name)}</a></th>'
            f'<td class="{_class_of(one)}">{_text(summary_of(one))}</td>'
            f'<td class="number">{one.num_updates}</td><td class="number">{one.seconds:.1f} s</td></tr>'
            for one in found.layouts
        )
        head = "".join(f"<th>{_text(word)}</th>" for word in ("layout", "result", "updates", "time"))
        yield (
            f'<section><h2>{_text("Layouts")}</h2><div class="scroll"><table class="list"><tr>{head}</tr>{"".join(links)}</table></div>'
            "</section>\n"
        )
    for one in found.layouts:
        yield f'<section id="{_text(one.layout.slug)}"><h2>{_text(one.layout.name)}</h2>{"".join(_layout(one))}</section>\n'
    yield _legend()


def _layout(one: LayoutResult) -> Iterator[str]:
    yield f'<p class="result {_class_of(one)}">{_text(summary_of(one))}</p>'
    if one.failure is not None:
        yield _failure(one.failure)
    if one.verdict is None:
        return
    if one.verdict.reason:
        yield f"<p>{_text(one.verdict.reason)}</p>"
    if one.verdict.finding is not None:
        yield _finding(one.verdict.finding)
    if one.verdict.also:
        also = "".join(f"<li>{_finding(each)}</li>" for each in one.verdict.also)
        title = _text(f"{len(one.verdict.also)} other differences, which do not follow from the first")
        yield f"<details><summary>{title}</summary><ul>{also}</ul></details>"
    for remark in one.verdict.remarks:
        yield f"<h3>{_text(REMARK)}</h3>{_finding(remark)}"
    if one.verdict.cells:
        yield _table(one.verdict)
    missing = [f"{cover.stage}: {text}" for cover in one.verdict.coverage for text in cover.missing]
    notes = "".join(f"<li>{_text(text)}</li>" for text in [*missing, *one.verdict.notes])
    if notes:
        yield f"<h3>{_text('Not compared')}</h3><ul>{notes}</ul>"


def _table(verdict: Verdict) -> str:
    cells = {(cell.update, cell.stage): cell for cell in verdict.cells}
    stages = [stage for stage in STAGES if any(cell.stage == stage for cell in verdict.cells)]
    head = "".join(f'<th scope="col">{stage}</th>' for stage in stages)
    first = None if verdict.finding is None else (verdict.finding.update, verdict.finding.stage)
    rows = []
    for update in sorted({cell.update for cell in verdict.cells}):
        row = "".join(_cell(cells.get((update, stage)), is_first=(update, stage) == first) for stage in stages)
        name = _text("start") if update < 0 else str(update)
        rows.append(f'<tr><th scope="row">{name}</th>{row}</tr>')
    return (
        f'<div class="scroll" tabindex="0"><table class="steps"><thead><tr><th scope="col">{_text("update")}</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(cell: Cell | None, *, is_first: bool) -> str:
    if cell is None:
        return "<td></td>"
    name, mark = _MARKS[cell.state]
    parts: list[str] = [cell.state]
    if cell.largest and cell.state != "equal bits":
        parts.append(f"{cell.largest:.2g} times the bound for rounding errors")
    parts.append(f"{cell.num_compared} values or tensors compared")
    title = "; ".join(parts)
    first = f' first" aria-label="{_text("first difference")}' if is_first else ""
    return f'<td class="{name}{first}" title="{escape(title)}">{mark}</td>'


def _finding(one: Finding) -> str:
    rows = {
        "what": one.what,
        "where": place_of(one),
        "ranks": ", ".join(map(str, one.ranks)),
        "tensors": ", ".join(one.tensors),
        "size": size_of(one),
        "line": shown_line(one.line) if one.line else "",
        "cause": cause_of(one),
        "do": one.do,
    }
    body = "".join(
        f'<dt>{_text(name)}</dt><dd class="{name}">{_text(value)}</dd>' for name, value in rows.items() if value
    )
    return f'<dl class="finding">{body}</dl>'


def _failure(failure: RunFailure) -> str:
    details = f"<pre>{_text(chr(10).join(failure.details))}</pre>" if failure.details else ""
    do = f'<dl class="finding"><dt>{_text("do")}</dt><dd class="do">{_text(failure.do)}</dd></dl>' if failure.do else ""
    return f"<p>{_text(failure.what)}</p>{details}{do}"


def _facts(found: Verification) -> str:
    plan = found.plan
    facts = {
        "script": " ".join([plan.script, *plan.arguments]),
        "compared with": plan.against
        or (f"the recorded run {plan.against_run}" if plan.against_run else "one process"),
        "updates": str(plan.steps),
        "resumed after": "" if plan.resume_after is None else f"{plan.resume_after} updates",
        "took": f"{found.seconds:.0f} s",
        "echelon": __version__,
    }
    body = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items() if value)
    return f'<dl class="facts">{body}</dl>'


def _legend() -> str:
    items = "".join(
        f'<li><span class="{name}">{mark or "&nbsp;"}</span> {_text(state)}</li>'
        for state, (name, mark) in _MARKS.items()
    )
    return f'<footer><ul class="legend">{items}</ul></footer>\n'


def _class_of(one: LayoutResult) -> str:
    return one.outcome if one.outcome in ("same", "different") else "unknown"


def _text(text: str) -> str:
    """Return ``text``, safe in HTML."""
    return escape(printable(text))
