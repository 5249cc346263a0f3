"""The results of `gpu_day.py` as the section "A day on a GPU" of RESULTS.md."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HEADING = "## A day on a GPU"
Line = Mapping[str, Any]


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file. A line that was cut off when the program was killed is left out."""
    found = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def section(file: Path) -> str:
    """Return the section for the results in ``file``."""
    lines = read(file)
    start = next((line for line in lines if line.get("kind") == "start"), None)
    if start is None:
        raise SystemExit(f"{file} holds no results of gpu_day.py: its first line is missing")
    results = [line for line in lines if line["kind"] == "result"]
    by_job: dict[str, list[Line]] = defaultdict(list)
    for line in results:
        by_job[line["job"] or ""].append(line)
    facts = {line["name"]: line for line in by_job["facts"]}
    about = facts.get("device", {})
    parts = [
        f"{HEADING}\n\n{_introduction(facts)}",
        _models([line for line in results if "tokens_per_s" in line], str(about.get("device", ""))),
        _syncs([line for line in results if "syncs" in line]),
        _checks([line for line in results if "passed" in line]),
        _numbers([line for line in results if "weight_difference" in line]),
        _saves(by_job["save"]),
        _memory([line for line in results if str(line["job"]).startswith("memory")]),
        _failures([line for line in results if "exit_code" in line]),
        _ends([line for line in lines if line["kind"] == "end"]),
        f"{start['date']}, {about.get('device', 'unknown device')}, {_versions(facts.get('versions', {}))}.\n"
        f"Repeat: `PYTHONPATH=src python benchmarks/gpu_day.py {' '.join(start['command'])}`, then "
        "`python -m benchmarks.gpu_day --read FOLDER/results.jsonl --write`.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(facts: Mapping[str, Line]) -> str:
    sentences = [
        "Everything here ran on one device within one time limit; [docs/gpu_day.md](../docs/gpu_day.md) describes each part."
    ]
    if "bf16 product" in facts and "copy" in facts:
        product, copy = facts["bf16 product"], facts["copy"]
        sentences.append(
            f"Measured limits of the device: {product['tflop_per_s']:,.4g} TFLOP/s for a product of bf16 matrices of "
            f"{product['size']} x {product['size']}, {copy['tb_per_s']:.3g} TB/s for a copy (bytes read and written)."
        )
    return " ".join(sentences)


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table whose first column is text and whose others are numbers."""
    header = list(columns)
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def _models(lines: list[Line], device: str) -> str:
    """Tokens per second of each variant: the faster of its turns."""
    if not lines:
        return ""
    from gpu import MODELS, flops_per_token, num_parameters, peak_of

    turns: dict[tuple[str, bool, str], list[Line]] = defaultdict(list)
    for line in lines:
        turns[line["model"], line["is_compiled"], line["variant"]].append(line)
    best = {key: max(found, key=lambda line: line["tokens_per_s"]) for key, found in turns.items()}
    rows = []
    for (model, is_compiled, variant), line in sorted(best.items(), key=lambda item: item[0][:2]):
        by_hand = best.get((model, is_compiled, "by hand"))
        ratio = f"{line['tokens_per_s'] / by_hand['tokens_per_s']:.3f}" if by_hand else ""
        used = line["tokens_per_s"] * flops_per_token(MODELS[model]) / (peak_of(device) * 1e12)
        rows.append(
            [
                f"{variant}, {model}{', compiled' if is_compiled else ''}", f"{line['tokens_per_s']:,.0f}", ratio,
                f"{1e3 * line['seconds']:.1f}", "" if math.isnan(used) else f"{100 * used:.1f} %",
                f"{line['peak'] / 2**30:.1f}", f"{line['loss']:.3f}", len(turns[model, is_compiled, variant]),
            ]
        )  # fmt: skip
    shapes = "; ".join(
        f"{name}: {num_parameters(shape) / 1e6:.0f} M parameters, {shape.batch} x {shape.length} tokens per step"
        for name, shape in MODELS.items()
    )
    columns = ["variant", "tokens/s", "of by hand", "ms per step", "MFU", "peak memory, GiB", "last loss", "turns"]
    return f"Language models in bf16 with AdamW and clipping ({shapes}), the faster turn of each:\n\n{_table(columns, rows)}"


def _checks(lines: list[Line]) -> str:
    if not lines:
        return ""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[line["job"]].append(line)
    rows, failed = [], []
    for job, found in groups.items():
        outcomes = [line["passed"] for line in found]
        rows.append([job, outcomes.count(True), outcomes.count(False), outcomes.count(None)])
        failed += [f"- {line['name']}: {_message(line['error'])}" for line in found if line["passed"] is False]
    text = "The engine contract and the tests that need an accelerator:\n\n"
    return (
        text
        + _table(["job", "passed", "failed", "skipped"], rows)
        + ("\n\nFailed:\n\n" + "\n".join(failed) if failed else "")
    )


def _message(error: str | None) -> str:
    """Return the line of a traceback or of pytest's report that says what is wrong."""
    lines = [line.strip() for line in (error or "").splitlines() if line.strip(" =-")]
    said = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return (said or lines or ["no message"])[-1]


def _syncs(lines: list[Line]) -> str:
    """Waits for the device: a row for each loop, a column for each setting."""
    if not lines:
        return ""

    def setting(line: Line) -> str:
        parts = [
            "float32" if line["precision"] == "no" else line["precision"],
            *(["clipping"] if line["clip"] else []),
            *(["accumulating"] if line["accumulate"] > 1 else []),
        ]
        return ", ".join(parts + ([] if line["fused"] else ["not fused"]))

    settings = list(dict.fromkeys(setting(line) for line in lines))
    loops = list(dict.fromkeys(line["loop"] for line in lines))
    counts = {(line["loop"], setting(line)): line for line in lines}
    rows = []
    for loop in loops:
        cells = [counts.get((loop, name)) for name in settings]
        rows.append([loop, *("" if c is None or c["syncs"] is None else f"{c['syncs'] / c['steps']:g}" for c in cells)])
    causes: dict[str, int] = defaultdict(int)
    for line in lines:
        for where, count in line["lines"]:
            causes[where] += count
    found = [f"- {count} times: `{where}`" for where, count in sorted(causes.items(), key=lambda item: -item[1])]
    text = "Waits of the host for the device per step, in steps that log nothing (loops on pinned memory, fused AdamW):\n\n"
    return (
        text + _table(["loop", *settings], rows) + ("\n\nThe lines that wait:\n\n" + "\n".join(found) if found else "")
    )


def _numbers(lines: list[Line]) -> str:
    if not lines:
        return ""

    def shown(value: Any) -> str:
        return "" if value is None else ("yes" if value is True else "no" if value is False else f"{value:.1e}")

    rows = [
        [line["name"], shown(line["loss_difference"]), shown(line["weight_difference"]), shown(line["bits_of_by_hand"])]
        for line in lines
    ]
    digests = {line["digest"] for line in lines if line["name"].startswith("bitwise")}
    columns = ["loop on the device", "largest difference of a loss", "of a weight", "the bits of the loop by hand"]
    text = (
        "Twenty float32 steps of AdamW (TF32 off), compared with a plain loop on the CPU; differences are relative:\n\n"
    )
    text += _table(columns, rows)
    if sum(line["name"].startswith("bitwise") for line in lines) > 1:
        same = "equal bit by bit" if len(digests) == 1 else "NOT equal"
        text += f'\n\nThe weights of `parity="bitwise"` on 1 and on 2 ranks are {same}.'
    return text


def _saves(lines: list[Line]) -> str:
    if not lines:
        return ""
    rows = [
        [
            line["name"], f"{line['num_bytes'] / 1e9:.2f}", f"{line['blocking_save_s']:.2f}", f"{line['blocked_s']:.2f}",
            f"{1e3 * line['step_s']:.1f}", f"{1e3 * line['step_beside_s']:.1f}",
        ]
        for line in lines
    ]  # fmt: skip
    columns = ["save", "GB", "a blocking save, s", "blocked for, s", "a step alone, ms", "a step beside the save, ms"]
    return "`save_state(blocking=False)` of GPT-2 with AdamW beside training:\n\n" + _table(columns, rows)


def _memory(lines: list[Line]) -> str:
    if not lines:
        return ""
    rows = [
        [line["name"], f"{1e3 * line['step_s']:.1f}", f"{line['peak_bytes'] / 2**30:.2f}", f"{line['last_loss']:.3f}"]
        for line in lines
    ]
    text = "The 1 B decoder in bf16 (fsdp2 on one rank; fp8: on one device):\n\n"
    return text + _table(["mode", "ms per step", "peak memory, GiB", "last loss"], rows)


def _failures(lines: list[Line]) -> str:
    if not lines:
        return ""
    text = []
    for line in lines:
        start = next(
            (i for i, one in enumerate(line["lines"]) if one.startswith("echelon: ")), max(0, len(line["lines"]) - 10)
        )
        report = [one for one in line["lines"][start : start + 12] if "recorded in" not in one]
        block = "\n".join(report)
        text.append(
            f"{line['name']}, exit code {line['exit_code']} after {line['seconds']:.0f} s:\n\n```text\n{block}\n```"
        )
    return "What a failure prints under `echelon launch`:\n\n" + "\n\n".join(text)


def _ends(lines: list[Line]) -> str:
    """Name what failed and what did not run."""
    failed = [line for line in lines if line["outcome"] not in ("done", "no time")]
    late = [line["job"] for line in lines if line["outcome"] == "no time"]
    text = [f"- {line['job']}: {line['outcome']}; {_message(chr(10).join(line['lines']))}" for line in failed]
    if late:
        text.append(f"- did not fit the budget: {'; '.join(late)}")
    return "Jobs without a result:\n\n" + "\n".join(text) if text else ""


def _versions(versions: Line) -> str:
    skipped = ("kind", "job", "name", "python")
    names = [f"{name} {value}" for name, value in versions.items() if name not in skipped and value]
    return f"Python {versions.get('python')}; {', '.join(names)}"
