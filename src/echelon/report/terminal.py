"""Draws the state of a live run in a terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.text import Text

from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.printable import printable
from echelon.report.live_run import Snapshot
from echelon.report.rank_rows import Difference, RankRow, at_place, fold_rows, sparkline

_STYLES = MappingProxyType(
    {
        Difference.STOPPED: "bold red",
        Difference.EXITED: "bold red",
        Difference.SILENT: "bold red",
        Difference.AWAITED: "red",
        Difference.SLOW: "yellow",
        Difference.BEHIND: "yellow",
        Difference.PHASE: "yellow",
        Difference.NONE: "",
    }
)
_NARROW, _WIDE = 60, 100
"""Widths in characters from which the table has more columns."""
_OPERATION_WIDTH = 40
_GAP = 2
_RIGHT = frozenset({"rank", "step", "heartbeat", "memory"})
_BAR_WIDTH = 24
_LOW = 14
"""Height in lines below which only the most important lines are drawn."""


def draw(snapshot: Snapshot, console: Console, *, height: int | None = None, hint: str = "") -> Group:
    """Return the picture of ``snapshot`` for ``console``.

    Args:
        console: the terminal; its width decides which columns are drawn.
        height: number of lines that are available; None for no limit.
        hint: last line, if there is room.
    """
    is_ascii = not console.encoding.startswith("utf")
    lines = [_line(text, style) for text, style in _head(snapshot, console.width, is_ascii=is_ascii)]
    events = [_("event: {event}", event=event) for event in snapshot.events]
    tail = [_line(text, "dim") for text in (*events, hint) if text]
    if height is not None and height < _LOW:
        lines, tail = lines[:2], []
    if height is None:
        room = len(snapshot.rows)
    else:  # the header of the table needs a line, too
        room = height - len(lines) - len(tail) - 1
        while room < min(len(snapshot.rows), 4) and tail:
            tail.pop(0)
            room += 1
    rows, rest = fold_rows(snapshot.rows, max(room, 1))
    table = _table(rows, console.width, is_ascii=is_ascii) if rows else []
    return Group(*lines, *table, *([_line(rest, "")] if rest else []), *tail)


def _line(text: str, style: str) -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _head(snapshot: Snapshot, width: int, *, is_ascii: bool) -> Iterator[tuple[str, str]]:
    machines = _(" on {number} machines", number=snapshot.num_machines) if snapshot.num_machines > 1 else ""
    processes = _(
        "{number} process{es}{machines}",
        number=snapshot.num_processes,
        es="" if snapshot.num_processes == 1 else "es",
        machines=machines,
    )
    parts = [_(snapshot.outcome), _clock(snapshot.elapsed_s), processes]
    if snapshot.num_restarts:
        s = "" if snapshot.num_restarts == 1 else "s"
        parts.append(_("{number} restart{s}", number=snapshot.num_restarts, s=s))
    yield f"{snapshot.name}: {', '.join(parts)}", "bold"
    yield _progress(snapshot, is_ascii=is_ascii), ""
    if numbers := _numbers(snapshot):
        yield numbers, ""
    if any(math.isfinite(loss) for loss in snapshot.losses):
        label = _("loss ({loss_from}): ", loss_from=snapshot.loss_from)
        yield label + sparkline(snapshot.losses, min(width - len(label), 80), is_ascii=is_ascii), "cyan"
    if snapshot.why_not_live:
        yield _("ranks: {why_not_live}", why_not_live=snapshot.why_not_live), ""
    elif snapshot.num_machines > 1:
        yield _("ranks on {host} (run echelon watch on the other machines for theirs)", host=snapshot.host), ""


def _progress(snapshot: Snapshot, *, is_ascii: bool) -> str:
    parts = [_("step {step:,}", step=snapshot.step) if snapshot.step else _("no step recorded yet")]
    if snapshot.num_steps:
        part = min(snapshot.step / snapshot.num_steps, 1.0)
        full, empty = ("#", ".") if is_ascii else ("━", "╌")
        done = round(part * _BAR_WIDTH)
        count = _("step {step:,} of {num_steps:,}", step=snapshot.step, num_steps=snapshot.num_steps)
        parts = [f"{count} {full * done}{empty * (_BAR_WIDTH - done)} {part:.0%}"]
    if math.isfinite(snapshot.epoch):
        parts.append(_("epoch {epoch:.2f}", epoch=snapshot.epoch))
    if math.isfinite(snapshot.steps_per_s):
        parts.append(_("{steps_per_s:.3g} steps/s", steps_per_s=snapshot.steps_per_s))
    if math.isfinite(snapshot.eta_s):
        parts.append(_("{eta_s} left", eta_s=_clock(snapshot.eta_s)))
    return ", ".join(parts)


def _numbers(snapshot: Snapshot) -> str:
    here = _(" on this machine") if snapshot.num_machines > 1 else ""
    parts = [
        "" if snapshot.loss is None else _("loss {loss:.4g}", loss=snapshot.loss),
        _("learning rate {lr:.3g}", lr=snapshot.lr) if math.isfinite(snapshot.lr) else "",
        _("gradient norm {grad_norm:.3g}", grad_norm=snapshot.grad_norm) if math.isfinite(snapshot.grad_norm) else "",
        _("{samples_per_s:,.0f} samples/s{here}", samples_per_s=snapshot.samples_per_s, here=here)
        if math.isfinite(snapshot.samples_per_s)
        else "",
        _("{items_per_s:,.0f} items/s{here}", items_per_s=snapshot.items_per_s, here=here)
        if math.isfinite(snapshot.items_per_s)
        else "",
    ]
    return ", ".join(filter(None, parts))


def _table(rows: Sequence[RankRow], width: int, *, is_ascii: bool) -> list[Text]:
    """Return the header and a line for each row; the column with the state takes the width that the others leave."""
    columns = {
        N_("rank"): [str(row.rank) for row in rows],
        N_("step"): ["" if r.step is None else f"{r.step:,}" for r in rows],
    }
    columns[N_("state")] = [
        _("; ").join(dict.fromkeys(part for part in (row.what, row.phase, _place(row)) if part)) for row in rows
    ]
    if width >= _WIDE:
        columns[N_("last operation")] = [
            _fit(_operation(row), _OPERATION_WIDTH, is_ascii=is_ascii).rstrip() for row in rows
        ]
    if width >= _NARROW:
        columns[N_("heartbeat")] = ["" if math.isnan(row.heartbeat_s) else f"{row.heartbeat_s:.1f} s" for row in rows]
        columns[N_("memory")] = ["" if math.isnan(row.memory_mb) else f"{row.memory_mb:,.0f} MB" for row in rows]
    columns = {name: [printable(cell) for cell in cells] for name, cells in columns.items()}
    titles = {name: _(name) for name in columns}
    widths = {name: max(map(cell_len, [titles[name], *cells])) for name, cells in columns.items()}
    others = sum(widths.values()) - widths["state"] + _GAP * (len(columns) - 1)
    widths["state"] = max(min(widths["state"], width - others), cell_len(titles["state"]))

    def line(cells: Iterable[tuple[str, str]], style: str) -> Text:
        fitted = [
            " " * (widths[name] - cell_len(cell)) + cell
            if name in _RIGHT
            else _fit(cell, widths[name], is_ascii=is_ascii)
            for name, cell in cells
        ]
        return Text((" " * _GAP).join(fitted).rstrip(), style=style, no_wrap=True, overflow="ellipsis")

    lines = [line(titles.items(), "dim")]
    for i, row in enumerate(rows):
        lines.append(line(((name, cells[i]) for name, cells in columns.items()), _STYLES[row.difference]))
    return lines


def _fit(text: str, width: int, *, is_ascii: bool) -> str:
    end = "..." if is_ascii else "…"
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - len(end)) + end


def _place(row: RankRow) -> str:
    """Return where the program of a rank that differs from the others is."""
    return at_place(os.path.basename(row.place)) if row.place and row.difference is not Difference.NONE else ""


def _operation(row: RankRow) -> str:
    return row.operation or (
        _("collective {num_collectives}", num_collectives=row.num_collectives) if row.num_collectives else ""
    )


def _clock(seconds: float) -> str:
    whole = max(round(seconds), 0)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
