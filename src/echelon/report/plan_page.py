"""Collects what the page of a plan shows: the verdict, memory over the step, layouts, traffic, and cost against ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from echelon._version import __version__
from echelon.base.messages.translation import gettext as _
from echelon.plan.facts import LayoutPlan
from echelon.plan.holdings import fullest_rank
from echelon.plan.step_memory import MemoryMoment, memory_over_step
from echelon.plan.verdict import JudgedLayout, PlanVerdict, Traces, format_bytes, global_batch, layout_name
from echelon.plan.verdict_text import (
    cluster_text,
    describe,
    format_seconds,
    launch_line,
    reserve_text,
    verdict_text,
)

_POINTS = 1200  # of a plot; of the moments between two points, the largest is shown


def plan_page_data(title: str, verdict: PlanVerdict, traces: Traces, *, script: str) -> dict[str, Any]:
    """Return the data of the page, for ``render_plan_page``."""
    asked, best = verdict.asked, verdict.best
    shown = [one for one in (asked, best) if one is not None and not one.plan.refused]
    shown = shown[:1] if len(shown) == 2 and shown[0].plan.layout == shown[1].plan.layout else shown
    plan = (best or asked).plan
    return {
        "echelon": __version__,
        "title": title,
        "fits": asked.fits,
        "verdict": verdict_text(asked, verdict.cluster),
        "cluster": cluster_text(verdict.cluster),
        "reserve": "" if asked.plan.refused else reserve_text(asked, verdict.reserve),
        "best": None
        if best is None
        else {"name": describe(best), "command": launch_line(best.plan.layout, verdict.cluster, script)},
        "capacity": verdict.cluster.gpu_memory,
        "memory": [_memory(one, verdict, traces) for one in shown],
        "changes": [
            [
                change.text,
                "  ".join([*change.flags, *([change.arguments] if change.arguments else [])]),
                format_bytes(change.candidate.plan.peak + change.candidate.reserve),
                format_seconds(change.candidate.plan.seconds),
            ]
            for change in verdict.changes
        ],
        "layouts": [_row(one) for one in verdict.candidates],
        "collectives": [
            [each.kind, each.axis, f"{each.count:,}", format_bytes(each.bytes)] for each in plan.collectives
        ],
        "host": [[_(name), format_bytes(size)] for name, size in plan.host_memory.items()],
        "formulas": [[_(name), text] for name, text in plan.formulas().items()],
        "of": layout_name(plan.layout),
        "over_ranks": {
            "ranks": [one.plan.layout.world for one in verdict.over_ranks],
            "memory": [one.plan.peak + one.reserve for one in verdict.over_ranks],
            "rate": [global_batch(one.plan.layout) / max(one.plan.seconds, 1e-9) for one in verdict.over_ranks],
            "cost": [
                one.plan.layout.world * one.plan.seconds / max(1, global_batch(one.plan.layout))
                for one in verdict.over_ranks
            ],
        },
        "notes": [_(note) for note in dict.fromkeys((*verdict.notes, *plan.notes))],
    }


def _memory(one: JudgedLayout, verdict: PlanVerdict, traces: Traces) -> dict[str, Any]:
    plan = one.plan
    moments = _fullest(plan, traces)
    picked = list(_thinned(moments))
    sizes = [moment.by_category for moment in picked]
    names = list(dict.fromkeys(name for one in sizes for name in one))
    return {
        "name": describe(one),
        "peak": plan.peak,
        "reserve": one.reserve,
        "categories": [[_(name), plan.memory.get(name, 0)] for name in names],
        "series": [[one.get(name, 0) for one in sizes] for name in names],
        "phases": [_(moment.moment.phase) for moment in picked],
        "lines": [moment.moment.line for moment in picked],
        "place": f"{_(plan.peak_phase)}, {plan.peak_line}",
    }


def _fullest(plan: LayoutPlan, traces: Traces) -> Sequence[MemoryMoment]:
    model, trace = traces.source.model, traces.exact(plan.layout.settings)
    stages = (
        memory_over_step(model, trace, plan.layout, fullest_rank(model, plan.layout, stage))
        for stage in range(plan.layout.pp)
    )
    return max(stages, key=lambda moments: max(one.total for one in moments))


def _thinned(moments: Sequence[MemoryMoment]) -> Iterator[MemoryMoment]:
    size = -(-len(moments) // _POINTS)
    for start in range(0, len(moments), size):
        yield max(moments[start : start + size], key=lambda one: one.total)


def _row(one: JudgedLayout) -> dict[str, Any]:
    layout = one.plan.layout
    return {
        "cells": [
            layout_name(layout),
            str(layout.settings.micro_batch),
            str(layout.accumulation),
            layout.settings.activation_checkpointing,
            "-" if one.plan.refused else format_bytes(one.plan.peak + one.reserve),
            one.plan.refused or (format_bytes(one.margin) if one.fits else _("does not fit")),
            "-" if one.plan.refused else format_seconds(one.plan.seconds),
        ],
        "fits": one.fits,
        "bytes": 0 if one.plan.refused else one.plan.peak + one.reserve,
    }
