"""Draw the plots of the benchmarks from the tables in benchmarks/RESULTS.md, one for a light page and one for a dark one.

``python docs/draw_benchmarks.py FOLDER`` writes them as SVG; `make docs` puts them beside their tables. Needs matplotlib.
"""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "RESULTS.md"

INK = {"light": "#1c2330", "dark": "#e8ecf2"}
FAINT = {"light": "#d6dae1", "dark": "#333c4a"}
OURS = {"light": "#3f6fd8", "dark": "#7ba2f5"}
THEIRS = {"light": "#b9c0cc", "dark": "#5c6675"}
MORE = {"light": "#2e9e83", "dark": "#4cc3a5"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Bars from one table: a group of bars for each row."""

    name: str
    values: dict[str, str]
    """Columns and what their bars are called; the first column holds the labels."""
    unit: str
    span: str = ""
    """A column "low - high", drawn as an error bar on the first value."""
    labels: tuple[int, ...] = (0,)
    join: str = ", "
    """What stands between several labels."""
    is_log: bool = False
    reference: float | None = None
    """Draw a line here: 1 where the values are ratios."""
    rows: str = ""
    """Only rows whose label matches this."""


PLOTS = {
    "At a glance": Plot(
        name="glance", values={"times as fast": "times as fast"}, unit="times as fast as the alternative (the line: equally fast)",
        labels=(0, 2), join=" vs ", reference=1, rows="^(?!resuming)",
    ),
    "Overhead of a training step": Plot(name="overhead", values={"adds": "added to the plain loop"}, unit="us of CPU time per step"),
    "Memory of a dataset": Plot(name="shared_memory", values={"MB": "growth of PSS"}, unit="MB over 4 ranks"),
    "Order": Plot(
        name="order", values={"middle, ms": "first batch after half of the epoch"}, unit="ms of CPU time",
        labels=(1, 0), is_log=True, rows=r"1?\d0,000,000$|100,000,000$",
    ),
    "Cost of exact parity": Plot(name="parity", values={"wall ratio": "exact / off"}, span="range", unit="ratio of wall time", reference=1),
    "A step of sharded models": Plot(name="engines", values={"`fully_shard`, ms": "fully_shard", "echelon, ms": "echelon"}, unit="ms per step"),
    "Saving a checkpoint": Plot(name="checkpoint", values={"s": "median"}, span="min - max", unit="seconds for 1.04 GB"),
    "Cost of bitwise parity": Plot(name="bitwise", values={"off, whole": "off", "exact": "exact", "bitwise": "bitwise"}, unit="ms of wall time per update"),
    "Time to the first step": Plot(name="first_step", values={"seconds": "median"}, span="min - max", unit="seconds"),
    "A DDP step": Plot(name="ddp", values={"wall": "the loop", "wall, by hand": "DDP by hand beside it"}, unit="ms per update"),
    "Time to 98.5 % on MNIST": Plot(
        name="mnist_time", unit="seconds",
        values={"whole, median (range)": "from the command", "steps, median (range)": "the steps alone"},
    ),
    "Launching, monitoring, restarting": Plot(name="launch", values={"p50": "median", "p95": "95th percentile"}, unit="seconds from SIGKILL to the next saved step"),
    "Cost of checking live updates": Plot(
        name="verify_every", values={"a check at N = 1,000": "checks"}, unit="% of the run's time, with a check at every 1,000th update", labels=(0, 1),
    ),
    "Cost of recording steps for `echelon verify`": Plot(
        name="verify_cost", values={"us per step": "plain loop", "recorded, us": "recorded by echelon"}, unit="us of CPU time per step", is_log=True,
    ),
    "Cost of bitwise tensor parallelism": Plot(
        name="bitwise_tp", values={"exact": "exact", "bitwise in chunks": "bitwise"}, unit="ms of wall time per update", labels=(0, 1),
    ),
    "A step with split layers": Plot(
        name="split_layers", values={"CPU, by hand": "by hand", "echelon": "echelon"}, unit="ms of CPU time per step"
    ),
    "A day on a GPU": Plot(
        name="gpu_waits", values={"float32": "float32", "fp16": "fp16"}, unit="waits of the host for the device, per step"
    ),
    "Planning a save": Plot(
        name="save_plan", values={"first save, CPU": "first save", "later save, CPU": "later saves"}, unit="s of CPU time", labels=(0, 1, 2),
        is_log=True, rows="rank zero",
    ),
    "Many machines": Plot(
        name="many_machines", values={"join, s": "all joined", "verdict, s": "failure reported", "restart, s": "restarted"}, unit="seconds, by number of machines",
    ),
}  # fmt: skip


def names() -> dict[str, str]:
    """Return the names of the plots, by the headings of their sections."""
    read = tables(RESULTS.read_text(encoding="utf-8"))
    return {heading: plot_of(heading, table).name for heading, table in read.items()}


def plot_of(heading: str, table: list[dict[str, str]]) -> Plot:
    """Return the plot of a section: one of PLOTS, or the first column of numbers."""
    if heading in PLOTS:
        return PLOTS[heading]
    columns = [column for column in list(table[0])[1:] if not column.startswith("#")]
    column = next(
        column for column in columns if sum(number(row.get(column, "")) is not None for row in table) >= len(table) / 2
    )
    return Plot(name=re.sub(r"\W+", "_", heading.lower()), values={column: column}, unit=column)


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Return the first table of each section: a list of rows by the names of the columns, and "#N" for the column N."""
    found = {}
    for section in re.split(r"(?m)^## ", text)[1:]:
        lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
        if lines:
            cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[0].splitlines()]
            header, _, *body = cells
            found[section.partition("\n")[0]] = [
                dict(zip(header, row)) | {f"#{number}": cell for number, cell in enumerate(row)} for row in body
            ]
    return found


def number(cell: str) -> float | None:
    """Return the first number of a cell."""
    found = re.search(r"-?\d[\d,]*\.?\d*", cell)
    return float(found[0].replace(",", "")) if found else None


def drawn(text: str | None = None) -> dict[str, bytes]:
    """Return the plots: ``NAME-light`` and ``NAME-dark``."""
    read = tables(RESULTS.read_text(encoding="utf-8") if text is None else text)
    plots = {heading: plot_of(heading, table) for heading, table in read.items()}
    return {f"{plot.name}-{page}": _draw(plot, read[heading], page) for heading, plot in plots.items() for page in INK}


def points(plot: Plot, table: list[dict[str, str]]) -> list[tuple[str, list[float], tuple[float, float] | None]]:
    """Return a row for each group of bars: its label, its values, and the span of the first."""
    found = []
    for row in table:
        label = plot.join.join(row[f"#{column}"] for column in plot.labels).replace("`", "")
        values = [number(row.get(column, "")) for column in plot.values]
        if None in values or (plot.rows and not re.search(plot.rows, label)):
            continue
        low_high = re.findall(r"\d[\d,.]*", row.get(plot.span, "")) if plot.span else []
        span = (float(low_high[0]), float(low_high[1])) if len(low_high) == 2 else None
        found.append((label, [value for value in values if value is not None], span))
    assert found, f"no rows for the plot {plot.name}"
    return found


def _draw(plot: Plot, table: list[dict[str, str]], page: str) -> bytes:
    import matplotlib  # noqa: PLC0415 - the tests read the tables without it

    matplotlib.use("svg")
    from matplotlib import pyplot  # noqa: PLC0415

    rows = points(plot, table)
    bars = len(plot.values)
    colors = [OURS, THEIRS, MORE] if _is_ours(next(iter(plot.values.values()))) else [THEIRS, OURS, MORE]
    settings: dict[str, Any] = {
        "svg.hashsalt": plot.name, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
        "text.color": INK[page], "axes.labelcolor": INK[page], "xtick.color": INK[page], "ytick.color": INK[page],
        "axes.edgecolor": FAINT[page], "font.sans-serif": ["system-ui", "DejaVu Sans"],
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(8.4, 0.9 + 0.36 * len(rows) * (1 + 0.55 * (bars - 1))))
        height = 0.72 / bars
        is_compared = any("echelon" in label for label, _, _ in rows)
        for number_of_bar, name in enumerate(plot.values.values()):
            for place, (label, values, span) in enumerate(rows):
                value = values[number_of_bar]
                y = place + (number_of_bar - (bars - 1) / 2) * height
                color = (
                    colors[number_of_bar] if bars > 1 else THEIRS if is_compared and "echelon" not in label else OURS
                )
                axes.barh(y, value, height * 0.92, color=color[page], label=name if place == 0 else None)
                end = span[1] if span and number_of_bar == 0 else value
                shown = f"{value:,.0f}" if value >= 100 else f"{value:g}"
                axes.annotate(shown, (end, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
                if span and number_of_bar == 0:
                    axes.plot(span, (y, y), color=INK[page], linewidth=1.2, marker="|", markersize=7)
        if bars > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=bars, frameon=False, borderaxespad=0.2)
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(plot.unit)
        if plot.is_log:
            axes.set_xscale("log")
        if plot.reference is not None:
            axes.axvline(plot.reference, color=INK[page], linewidth=0.8, linestyle=":")
        axes.margins(x=0.12)
        axes.grid(axis="x", color=FAINT[page], linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
        out = io.BytesIO()
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
    return out.getvalue()


def _is_ours(name: str) -> bool:
    return "echelon" in name or name in ("exact", "off", "all joined", "median")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn().items():
        (folder / f"{name}.svg").write_bytes(svg)
