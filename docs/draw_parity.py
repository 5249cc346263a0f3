"""Draw the pictures of parity.md: how a batch is cut, from the library's own arithmetic, and curves that were measured.

From the stored measurement of the curves; with ``--measure``, those six trainings first, which takes a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from echelon.data.global_batch_slices import contributions, num_micro_steps

DOCS = Path(__file__).resolve().parent
WORLDS = (1, 2, 3)
Curves = dict[str, dict[str, list[tuple[int, float]]]]

SAMPLES, BATCH, MOST = 23, 10, 3  # of the first picture: the data set, the batch, max_micro_batch_size
CELL, ROW, GAP = 30, 34, 14

# By rank: background, edge and text; on a light page, and on a dark one.
LIGHT = (("#d4e5ff", "#5b94e6", "#123a73"), ("#ffe3bd", "#e09a3a", "#703e00"), ("#cbf0db", "#3fa974", "#0b5233"),
         ("#e8dafb", "#9a6be0", "#4b1f86"))  # fmt: skip
DARK = (("#1d4173", "#5b94e6", "#dbe9ff"), ("#6b3f0c", "#d8923a", "#ffead0"), ("#175439", "#3fa974", "#d5f5e5"),
        ("#472a75", "#a47be6", "#ecdffd"))  # fmt: skip
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


def style() -> str:
    """Return the colours: those of a light page, and under a media query those of a dark one."""

    def rules(page: str, edge: str, text: str, faint: str, line: str, ranks: tuple[tuple[str, str, str], ...]) -> str:
        rows = [f".page{{fill:{page};stroke:{edge}}}.text{{fill:{text}}}.faint{{fill:{faint}}}.line{{stroke:{line}}}"]
        rows.append(f".plain{{fill:{line};stroke:{faint}}}")
        for rank, (background, border, letters) in enumerate(ranks):
            rows.append(f".r{rank}{{fill:{background};stroke:{border}}}.t{rank}{{fill:{letters}}}")
            rows.append(f".c{rank}{{stroke:{border};fill:none}}.d{rank}{{fill:{border}}}")
            rows.append(f".loan.r{rank}{{fill:none}}.loan.t{rank}{{fill:{faint}}}")
        return "".join(rows)

    light = rules("#ffffff", "#d6dae1", "#1c2330", "#5c6675", "#e4e7ec", LIGHT)
    dark = rules("#161b24", "#333c4a", "#e8ecf2", "#9aa5b5", "#2c3441", DARK)
    shapes = f"text{{font-family:{FONT}}}.loan{{stroke-dasharray:3 3}}"
    return f"<style>{shapes}{light}@media (prefers-color-scheme: dark){{{dark}}}</style>"


def text(
    x: float, y: float, words: str, *, size: float = 13, kind: str = "text", anchor: str = "start", weight: int = 400
) -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}">{words}</text>'


def cell(x: float, y: float, word: object, kind: str, letters: str) -> str:
    """Return a sample: a box with its place in the order."""
    box = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{CELL - 3}" height="{CELL - 3}" rx="5" stroke-width="1.4"/>'
    return box + text(x + (CELL - 3) / 2, y + 18.5, str(word), size=12.5, kind=letters, anchor="middle", weight=600)


def picture(width: float, height: float, title: str, parts: list[str]) -> str:
    """Return the SVG: a card with its own background, so that it can be read on any page."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img">',
        f"<title>{title}</title>",
        style(),
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="12"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def cut(update: range, world_size: int, x: float, y: float, *, weights: bool) -> list[str]:
    """Draw how ``update`` is cut: a row for each rank, a group of boxes for each micro-step."""
    num_micro = num_micro_steps(len(update), world_size=world_size, wanted=1, max_micro_batch_size=MOST)
    parts = []
    for rank in range(world_size):
        top = y + rank * ROW
        total = 0
        for one in contributions(update, rank=rank, world_size=world_size, num_micro=num_micro):
            left = x + one.micro_step * (MOST * CELL + GAP)
            kind = "loan " if one.is_padding else ""
            total += one.num_items
            for i, place in enumerate(one.samples):
                parts.append(cell(left + i * CELL, top, place, f"{kind}r{rank}", f"{kind}t{rank}"))
        if weights:
            note = f"weight {total}" + ("" if total else ", a padding sample")
            parts.append(text(x + MOST * CELL + 12, top + 18, note, size=12.5, kind="faint"))
    return parts


def draw_cut() -> str:
    """Return the picture of one order and its cuts."""
    updates = [range(i, min(i + BATCH, SAMPLES)) for i in range(0, SAMPLES, BATCH)]
    parts = [
        text(28, 40, "One order, one batch, any number of processes", size=19, weight=700),
        text(28, 63, f"{SAMPLES} samples in batches of {BATCH}, at most {MOST} per process in one forward pass. "
             "Each number is a position in the sample order of the epoch.", kind="faint"),
    ]  # fmt: skip
    x = 28.0
    for number, update in enumerate(updates):
        parts.append(text(x, 96, f"update {number + 1}: {len(update)} samples", weight=600))
        parts += [cell(x + i * CELL, 105, place, "plain", "text") for i, place in enumerate(update)]
        x += len(update) * CELL + 20

    left, right, y = 150.0, 580.0, 196.0
    parts.append(text(left, y - 34, f"update 1: the sum over {BATCH} samples, / {BATCH}", weight=600))
    parts.append(
        text(
            right,
            y - 34,
            f"update {len(updates)}: the sum over {len(updates[-1])} samples, / {len(updates[-1])}",
            weight=600,
        )
    )
    for micro in range(4):
        parts.append(text(left + micro * (MOST * CELL + GAP), y - 13, f"micro-step {micro + 1}", size=12, kind="faint"))
    for world_size in (1, 2, 3, 4):
        height = world_size * ROW
        parts.append(f'<path class="line" d="M28 {y - 5:g}H872" stroke-width="1.2"/>')
        middle = y + height / 2 + 3
        parts.append(text(28, middle, f"{world_size} process{'es' if world_size > 1 else ''}", size=14, weight=700))
        parts += cut(updates[0], world_size, left, y + 3, weights=False)
        parts += cut(updates[-1], world_size, right, y + 3, weights=True)
        y += height + 12
    return picture(900, y + 14, "How a global batch is cut for 1, 2, 3 and 4 processes", parts)


def draw_curves(curves: Curves) -> str:
    """Return the picture of the measured curves: off beside exact."""
    parts = [
        text(28, 40, "The same script on 1, 2 and 3 processes", size=19, weight=700),
        text(
            28,
            63,
            "MNIST, 3,168 images, DataLoader(batch_size=32), SGD, float32: loss on 1,000 test images.",
            kind="faint",
        ),
    ]
    most = max(loss for by_world in curves.values() for curve in by_world.values() for _, loss in curve)
    end = max(seen for by_world in curves.values() for curve in by_world.values() for seen, _ in curve)
    width, height, top = 370.0, 250.0, 120.0

    def place(left: float, seen: float, loss: float) -> str:
        return f"{left + seen / end * width:.1f} {top + height - loss / most * height:.1f}"

    for number, (parity, by_world) in enumerate(curves.items()):
        left = 62 + number * 440.0
        parts.append(text(left, top - 22, f'parity="{parity}"', size=15, weight=700))
        for tick in range(int(2 * most) + 1):
            level = top + height - tick / 2 / most * height
            parts.append(f'<path class="line" d="M{left:g} {level:.1f}h{width:g}" stroke-width="1.2"/>')
            parts.append(text(left - 9, level + 4, f"{tick / 2:g}", size=12, kind="faint", anchor="end"))
        for seen in range(0, end + 1, 1000):
            parts.append(
                text(left + seen / end * width, top + height + 20, f"{seen:,}", size=12, kind="faint", anchor="middle")
            )
        parts.append(text(left + width / 2, top + height + 41, "images seen", size=12.5, kind="faint", anchor="middle"))
        parts += _names(parity, by_world, left + width)
        # Wide below narrow, so that curves which coincide can all be seen.
        widths = (8.0, 4.4, 1.4) if parity == "exact" else (2.2, 2.2, 2.2)
        for world, curve in by_world.items():
            points = " L".join(place(left, seen, loss) for seen, loss in curve)
            rank = int(world) - 1
            parts.append(
                f'<path class="c{rank}" d="M{points}" stroke-width="{widths[rank]:g}" stroke-linejoin="round"/>'
            )
    return picture(900, top + height + 64, "Loss curves with parity off and exact on 1, 2 and 3 processes", parts)


def _names(parity: str, by_world: dict[str, list[tuple[int, float]]], right: float) -> list[str]:
    words = [
        f"{world} process{'es' if world != '1' else ''}: ends at {curve[-1][1]:.3f}"
        for world, curve in by_world.items()
    ]
    if parity == "exact":
        words.append(f"at most {largest_difference(by_world):.0e} apart".replace("e-0", "e-"))
    left, top = right - 200, 126
    parts = [
        f'<rect class="page" style="stroke:none" x="{left - 8:g}" y="{top}" width="220" height="{22 * len(words) + 8}"/>'
    ]
    for number, name in enumerate(words):
        y = top + 20 + 22 * number
        if number < len(by_world):
            parts.append(f'<rect class="d{number}" x="{left:g}" y="{y - 7}" width="22" height="5" rx="2.5"/>')
        parts.append(text(left + 32, y, name, size=12.5, kind="text" if number < len(by_world) else "faint"))
    return parts


def largest_difference(by_world: dict[str, list[tuple[int, float]]]) -> float:
    """Return by how much the losses of any number of processes differ from those of one."""
    one = by_world["1"]
    return max(abs(a[1] - b[1]) for curve in by_world.values() for a, b in zip(one, curve, strict=True))


def measure() -> Curves:
    """Run the training with ``echelon launch``, six times: only the flags differ."""
    curves: Curves = {}
    for parity in ("off", "exact"):
        for world in WORLDS:
            launch = [sys.executable, "-m", "echelon", "launch", "--cpu", "-q", "--num_processes", str(world)]
            command = [*launch, "--parity", parity, str(DOCS / "parity_curves.py")]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            curves.setdefault(parity, {})[str(world)] = json.loads(done.stdout.splitlines()[-1])
    return curves


def main() -> None:
    """Write the pictures beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run the trainings again")
    data = DOCS / "parity_curves.json"
    if parser.parse_args().measure:
        data.write_text(json.dumps(measure()) + "\n")
    (DOCS / "parity_cut.svg").write_text(draw_cut())
    (DOCS / "parity_curves.svg").write_text(draw_curves(json.loads(data.read_text())))


if __name__ == "__main__":
    main()
