"""A drawn program of level 1 in one process of plain PyTorch: each sample once, and the mean over the ranks of their means."""

from __future__ import annotations

from typing import Any

import torch

from tests import reference
from tests.programs.parts import (
    Rows,
    losses_of,
    make_loader,
    make_model,
    make_optimizers,
    make_schedule,
    prediction_of,
)
from tests.programs.plain import Expected, clip_of, rounds_of_own_cut
from tests.programs.program import Case
from tests.reference import PlainLoop, Round


def run_native_plainly(case: Case) -> Expected:
    """Run the case's program to its end."""
    program = case.program
    rows = Rows(program)
    model = make_model(program)
    optimizers = make_optimizers(program, model)
    schedules = [make_schedule(program, optimizer) for optimizer in optimizers]
    loop = PlainLoop(
        model,
        lambda piece: losses_of(program, model, rows.batch(piece, program)),
        optimizers,
        schedules=[s for s in schedules if s is not None],
        clip=clip_of(program),
        calls_closure=program.closure,
    )
    expected = Expected(weights=[], losses=[], norms=[], rates=[], epochs=[])
    evaluation = Rows(program, num_samples=5 + program.seed % 7, seed=900)

    def evaluate() -> None:
        whole = evaluation.batch(list(range(len(evaluation))), program)
        with torch.no_grad():
            expected.evaluations.append(prediction_of(model(whole.x, whole.token))[:, 0].double())

    for epoch in range(program.epochs):
        if program.unfreezes == epoch:
            for parameter in model.parameters():
                parameter.requires_grad_(True)
        rounds = _rounds(case, rows, epoch=epoch)
        rounds = [round_ for i, round_ in enumerate(rounds) if not (program.skips and i % 3 == 1)]
        seen: list[int] = []
        for update, start in enumerate(range(0, len(rounds), program.accumulation), start=1):
            window = rounds[start : start + program.accumulation]
            seen += [i for round_ in window for piece in round_ for i in piece]
            loop.update(window)
            if program.evaluates == "middle" and update == 1:
                evaluate()
            if update == program.breaks:
                break
        expected.epochs.append(seen)
        if program.evaluates == "epoch":
            evaluate()
    expected.weights = [p.detach() for p in model.parameters()]
    expected.losses, expected.norms, expected.rates = loop.found_losses, loop.found_norms, loop.found_rates
    return expected


def _rounds(case: Case, rows: Rows, *, epoch: int) -> list[Round]:
    program, world_size = case.program, case.layout.world_size
    if program.already_sharded:
        return rounds_of_own_cut(program, world_size, program.batch_size)
    if program.order in ("shuffle", "generator"):
        seed = program.seed + 3 if program.seedable else program.seed + 77 if program.order == "generator" else 0
        order = reference.permutation(program.num_samples, seed=seed, epoch=epoch)
    else:
        sampler: Any = make_loader(program, rows).sampler
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        order = list(sampler)
    return reference.sharded_order(
        order, world_size=world_size, batch_size=program.batch_size, even=True, drop_last=program.drop_last
    )
