"""Says in words, and as JSON data, what a verdict on layouts is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from echelon.base.errors import UsageError
from echelon.base.messages.terminal import align_columns
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.base.printable import printable
from echelon.plan.facts import Cluster, LayoutPlan, ParallelLayout
from echelon.plan.verdict import (
    JudgedLayout,
    PlanVerdict,
    Reserve,
    axis_sizes,
    flags_of,
    format_bytes,
    global_batch,
    layout_name,
)

# What plans name, so that it is translated.
_NAMES = (
    *(N_("parameters"), N_("master weights"), N_("gradients"), N_("optimizer state"), N_("buffers"), N_("buckets")),
    *(N_("activations"), N_("temporaries"), N_("batch"), N_("gathered parameters"), N_("unreduced gradients")),
    *(N_("reduction buffers"), N_("low-precision copies of weights")),
    *(
        N_("rank 0 at load"),
        N_("a machine at load"),
        N_("rank 0 at save"),
        N_("a machine at save"),
        N_("offload, a rank"),
    ),
    N_("offload, a machine"),
)
_SHOWN = 12  # layouts in the table of the terminal


def to_lines(title: str, verdict: PlanVerdict, *, script: str) -> Iterator[str]:
    """Yield the lines that the terminal shows, the verdict first."""
    asked, best = verdict.asked, verdict.best
    yield from _verdict_lines(title, asked, verdict.cluster, verdict.reserve)
    yield ""
    yield from _best_lines(asked, best, script)
    yield from _change_lines(verdict, script)
    yield ""
    yield from align_columns(_memory_rows(asked, best))
    yield ""
    yield from align_columns(_layout_rows(verdict))
    left = len(verdict.candidates) - _SHOWN
    if left > 0:
        yield _("and {number} more (echelon plan --json lists all)", number=left)
    shown = best or asked
    if not shown.plan.refused:
        yield ""
        yield from _cost_lines(shown)
    for note in dict.fromkeys((*verdict.notes, *shown.plan.notes)):
        yield _("note: {note}", note=printable(_(note)))


def to_short_lines(title: str, asked: JudgedLayout, cluster: Cluster | None, reserve: Reserve) -> Iterator[str]:
    """Yield what ``asked`` needs; without a ``cluster``, no verdict."""
    yield from _verdict_lines(title, asked, cluster, reserve)
    yield ""
    yield from align_columns(_memory_rows(asked, None))


def _verdict_lines(title: str, asked: JudgedLayout, cluster: Cluster | None, reserve: Reserve) -> Iterator[str]:
    yield title
    if cluster is not None:
        yield _("on {cluster}", cluster=cluster_text(cluster))
        yield ""
    yield describe(asked) if cluster is None else verdict_text(asked, cluster)
    if not asked.plan.refused:
        yield "  " + _(
            "counted: {peak} at the peak, in {phase}, at {line}",
            peak=format_bytes(asked.plan.peak),
            phase=_(asked.plan.peak_phase),
            line=printable(asked.plan.peak_line) or "-",
        )
        yield "  " + reserve_text(asked, reserve)


def verdict_text(asked: JudgedLayout, cluster: Cluster) -> str:
    """Return the answer in one sentence."""
    name = describe(asked)
    if asked.plan.refused:
        return _("CANNOT RUN: {name}: {reason}", name=name, reason=asked.plan.refused)
    needed = format_bytes(cluster.gpu_memory - asked.margin)
    size = format_bytes(cluster.gpu_memory)
    if asked.fits:
        return _(
            "FITS: {name} needs {needed} of {size} ({rest} left)",
            name=name,
            needed=needed,
            size=size,
            rest=format_bytes(asked.margin),
        )
    return _(
        "DOES NOT FIT: {name} needs {needed} of {size} ({rest} too much)",
        name=name,
        needed=needed,
        size=size,
        rest=format_bytes(-asked.margin),
    )


def reserve_text(candidate: JudgedLayout, reserve: Reserve) -> str:
    """Return what is kept free, and for what."""
    text = _(
        "kept free: {size} for what is not counted: {context} for the CUDA context and workspaces, {share:.0%} of the peak for "
        "fragmentation and errors of the trace",
        size=format_bytes(candidate.reserve),
        context=format_bytes(reserve.context),
        share=reserve.share,
    )
    if candidate.plan.layout.world == 1:
        return text
    return text + _(", {communicator} for NCCL on each mesh axis", communicator=format_bytes(reserve.communicator))


def describe(candidate: JudgedLayout) -> str:
    """Return the layout with its micro-batch and what it recomputes."""
    layout = candidate.plan.layout
    parts = [layout_name(layout), _("micro-batch {size}", size=layout.settings.micro_batch)]
    if layout.accumulation > 1:
        parts.append(_("{number} accumulation steps", number=layout.accumulation))
    if layout.settings.activation_checkpointing != "none":
        parts.append(_("activation checkpointing {mode}", mode=layout.settings.activation_checkpointing))
    return ", ".join(parts)


def cluster_text(cluster: Cluster) -> str:
    """Return the devices in words."""
    total = cluster.gpus_per_node * cluster.nodes
    memory = format_bytes(cluster.gpu_memory)
    name = f"{cluster.device} ({memory})" if cluster.device else memory
    text = f"{total} x {name}"
    return text if cluster.nodes == 1 else _("{devices} in {nodes} machines", devices=text, nodes=cluster.nodes)


def launch_line(layout: ParallelLayout, cluster: Cluster, script: str) -> str:
    """Return the command that runs ``layout``; several machines run it each."""
    words = ["echelon launch", f"--num_processes {cluster.gpus_per_node * cluster.nodes}"]
    if cluster.nodes > 1:
        words.append(f"--num_machines {cluster.nodes} --main_process_ip HOST")
    return " ".join([*words, *flags_of(layout), script])


def _best_lines(asked: JudgedLayout, best: JudgedLayout | None, script: str) -> Iterator[str]:
    if best is None:
        yield _("no layout fits with a global batch of {batch}", batch=global_batch(asked.plan.layout))
        return
    layout = best.plan.layout
    if layout == asked.plan.layout:
        yield _("it is the fastest of the layouts with a global batch of {batch}", batch=global_batch(layout))
    else:
        yield _(
            "the fastest that fits, with a global batch of {batch}: {name}: {needed}, {left} left, {seconds} per step",
            batch=global_batch(layout),
            name=describe(best),
            needed=format_bytes(best.plan.peak + best.reserve),
            left=format_bytes(best.margin),
            seconds=format_seconds(best.plan.seconds),
        )
    cluster = Cluster(gpus_per_node=layout.world, nodes=1, gpu_memory=0)
    yield f"  {launch_line(layout, cluster, script)}"
    if layout.cpu_offload:
        yield "  " + _(
            "with {size} of host memory on each machine",
            size=format_bytes(best.plan.host_memory.get("offload, a machine", 0)),
        )
    if layout.settings.micro_batch != asked.plan.layout.settings.micro_batch:
        yield "  " + _("batch size of the DataLoader: {size}", size=layout.settings.micro_batch)


def _change_lines(verdict: PlanVerdict, script: str) -> Iterator[str]:
    if verdict.asked.fits:
        return
    yield ""
    if not verdict.changes:
        yield _("no single change makes it fit")
        return
    yield _("single changes that make it fit, the cheapest first:")
    rows = []
    for change in verdict.changes:
        plan = change.candidate.plan
        what = "  ".join([*change.flags, *([change.arguments] if change.arguments else [])])
        memory = format_bytes(plan.peak + change.candidate.reserve)
        rows.append((f"  {change.text}", memory, format_seconds(plan.seconds), what))
    yield from align_columns(rows)


def _memory_rows(asked: JudgedLayout, best: JudgedLayout | None) -> list[tuple[str, ...]]:
    shown = [asked] if best is None or best.plan.layout == asked.plan.layout else [asked, best]
    plans = [one.plan for one in shown if not one.plan.refused]
    names = list(dict.fromkeys(name for plan in plans for name in plan.memory))
    heads = [layout_name(plan.layout) for plan in plans]
    rows: list[tuple[str, ...]] = [(_("memory of a rank at the peak"), *heads)]
    rows += [("  " + _(name), *(format_bytes(plan.memory.get(name, 0)) for plan in plans)) for name in names]
    rows.append(("  " + _("counted"), *(format_bytes(plan.peak) for plan in plans)))
    if any(plan.worst_peak > plan.peak for plan in plans):
        most = (format_bytes(max(plan.peak, plan.worst_peak)) for plan in plans)
        rows.append(("  " + _("if all tokens choose the experts of one rank"), *most))
    host = list(dict.fromkeys(name for plan in plans for name in plan.host_memory))
    rows += [
        (_("host memory, {what}", what=_(name)), *(format_bytes(p.host_memory.get(name, 0)) for p in plans))
        for name in host
    ]
    return rows


def _layout_rows(verdict: PlanVerdict) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (_("layout"), _("micro-batch"), _("accumulation"), _("recomputed"), _("memory"), _("left"), _("step"))
    ]
    for one in verdict.candidates[:_SHOWN]:
        layout = one.plan.layout
        start = (
            layout_name(layout),
            str(layout.settings.micro_batch),
            str(layout.accumulation),
            layout.settings.activation_checkpointing,
        )
        if one.plan.refused:
            rows.append((*start, "-", "-", one.plan.refused))
            continue
        left = format_bytes(one.margin) if one.fits else _("does not fit")
        rows.append((*start, format_bytes(one.plan.peak + one.reserve), left, format_seconds(one.plan.seconds)))
    return rows


def _cost_lines(shown: JudgedLayout) -> Iterator[str]:
    plan = shown.plan
    yield _(
        "{name}: {flops:.3g} FLOPs per step and rank, a checkpoint of {size}",
        name=layout_name(plan.layout),
        flops=plan.flops,
        size=format_bytes(plan.checkpoint_bytes),
    )
    rows = [(_("collective"), _("mesh axis"), _("calls per step"), _("bytes per step"))]
    rows += [(one.kind, one.axis, f"{one.count:,}", format_bytes(one.bytes)) for one in plan.collectives]
    if plan.collectives:
        yield from align_columns(rows)
    yield _("times put layouts in order; they do not predict a clock: echelon tune measures")


def format_seconds(seconds: float) -> str:
    """Return a time with a unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def explain(what: str, plan: LayoutPlan) -> Iterator[str]:
    """Yield the formulas behind the numbers whose names contain ``what``, or all of them for ``all``.

    Raises:
        UsageError: there is no such number.
    """
    formulas = plan.formulas()
    found = {name: text for name, text in formulas.items() if what == "all" or what.lower() in name.lower()}
    if not found:
        raise UsageError(
            _("there is no formula for {what!r}", what=what),
            where="--explain",
            do=_("choose one of {names}, or all", names=", ".join(formulas)),
        )
    yield layout_name(plan.layout)
    yield from map(printable, align_columns([(f"  {name}", text) for name, text in found.items()]))


def to_hyperparameters(judged: JudgedLayout) -> dict[str, Any]:
    """Return what the record of a run keeps of its plan, for ``echelon report``."""
    plan = judged.plan
    return {} if plan.refused else {"plan": {"layout": layout_name(plan.layout), "peak_bytes": plan.peak}}


def to_json(verdict: PlanVerdict) -> dict[str, Any]:
    """Return the verdict as JSON data. Sizes in bytes, times in seconds."""
    return {
        "cluster": asdict(verdict.cluster),
        "fits": verdict.asked.fits,
        "asked": _candidate_json(verdict.asked, is_whole=True),
        "best": None if verdict.best is None else _candidate_json(verdict.best, is_whole=True),
        "changes": [
            {
                "text": change.text,
                "flags": list(change.flags),
                "arguments": change.arguments,
                **_candidate_json(change.candidate, is_whole=False),
            }
            for change in verdict.changes
        ],
        "layouts": [_candidate_json(one, is_whole=False) for one in verdict.candidates],
        "over_ranks": [_candidate_json(one, is_whole=False) for one in verdict.over_ranks],
        "notes": list(verdict.notes),
    }


def _candidate_json(one: JudgedLayout, *, is_whole: bool) -> dict[str, Any]:
    plan = one.plan
    found: dict[str, Any] = {
        "name": layout_name(plan.layout),
        "engine": plan.layout.engine,
        "mesh": axis_sizes(plan.layout),
        "stage": plan.layout.stage,
        "cpu_offload": plan.layout.cpu_offload,
        "accumulation": plan.layout.accumulation,
        "settings": asdict(plan.layout.settings),
        "global_batch": global_batch(plan.layout),
        "flags": list(flags_of(plan.layout)),
        "fits": one.fits,
        "refused": plan.refused or None,
        "peak": plan.peak,
        "worst_peak": max(plan.peak, plan.worst_peak),
        "reserve": one.reserve,
        "margin": one.margin,
        "seconds": plan.seconds,
    }
    if is_whole:
        found |= {
            "memory": dict(plan.memory),
            "peak_phase": plan.peak_phase,
            "peak_line": plan.peak_line,
            "host_memory": dict(plan.host_memory),
            "collectives": [asdict(each) for each in plan.collectives],
            "flops": plan.flops,
            "checkpoint_bytes": plan.checkpoint_bytes,
            "formulas": dict(plan.formulas()),
            "notes": list(plan.notes),
        }
    return found
