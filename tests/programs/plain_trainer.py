"""A drawn program for a Trainer (level 3) in one process of plain PyTorch: what a Trainer does by definition.

Its order is a permutation of (seed, epoch), an update has ``gradient_accumulation_steps`` batches of every process, the end of
an epoch closes a window, schedules count updates, and ``max_steps`` begins as many epochs as it needs. In the exact modes an
update is a batch of ``global_batch_size``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from tests.programs.parts import Rows, make_loader, prediction_of
from tests.programs.plain import Expected, clip_of, rounds_of
from tests.programs.program import Case, Layout, Program
from tests.programs.trainer_parts import (
    NO_LABEL,
    Named,
    counts_items,
    losses_of,
    make_net,
    make_optimizer,
    make_trainer_schedule,
)
from tests.reference import PlainLoop, Round


def run_trainer_plainly(case: Case) -> Expected:
    """Run the case's program to its end."""
    return _PlainTrainer(case).run()


class _PlainTrainer:
    def __init__(self, case: Case) -> None:
        self.case, self.program = case, case.program
        program = self.program
        self.rows = Rows(program)
        self.data = Named(program, self.rows)
        self.evaluation = Named(program, Rows(program, num_samples=5 + program.seed % 7, seed=900))
        self.model = make_net(program)
        optimizer = make_optimizer(program, self.model)
        self.num_steps = self._planned()
        schedule = make_trainer_schedule(program, optimizer, num_steps=self.num_steps)
        self.loop = PlainLoop(
            self.model,
            lambda piece: losses_of(program, self.model, self.data.batch(piece)),
            [optimizer],
            schedules=[] if schedule is None else [schedule],
            clip=clip_of(program),
        )
        self.expected = Expected(weights=[], losses=[], norms=[], rates=[], epochs=[])

    def run(self) -> Expected:
        program, loop, expected = self.program, self.loop, self.expected
        for epoch in itertools.count():
            is_over = len(loop.updates) >= self.num_steps if program.max_steps else epoch >= program.epochs
            if is_over or not self.num_steps or not self._windows(epoch, self.layout):
                break
            self._epoch(epoch)
            if program.evaluates == "epoch":
                self._evaluate()
        for seed in (901, 902, 901) if program.eval_sets else ():
            self._evaluate(Named(program, Rows(program, num_samples=5 + program.seed % 7, seed=seed)))
        expected.weights = [p.detach() for p in self.model.parameters()]
        expected.losses, expected.norms, expected.rates = loop.found_losses, loop.found_norms, loop.found_rates
        return expected

    def _epoch(self, epoch: int) -> None:
        program, loop = self.program, self.loop
        windows = self._windows(epoch, self.layout)
        for number, window in enumerate(windows):
            loop.update(window)
            if self.case.layout.parity != "off" and counts_items(program) and not self._num_items(window):
                loop.found_losses[-1] = math.nan  # no labels, no mean
            step = len(loop.updates)
            if program.evaluates == "middle" and (step % 2 == 0 or step == self.num_steps):
                self._evaluate()
            if number + 1 == program.breaks or (program.max_steps and step == self.num_steps):
                return

    def _num_items(self, window: list[Round]) -> int:
        at = [index for round_ in window for piece in round_ for index in piece]
        return int(self.data.batch(at)["labels"].ne(NO_LABEL).sum())

    def _planned(self) -> int:
        """Return the updates that the first start plans."""
        return self.program.max_steps or len(self._windows(0, self.case.layout)) * self.program.epochs

    @property
    def layout(self) -> Layout:
        """That of the second start, once the first one has ended."""
        program, case = self.program, self.case
        has_saved = program.saves is not None and len(self.loop.updates) >= program.saves
        return case.other if has_saved and case.other is not None else case.layout

    def _windows(self, epoch: int, layout: Layout) -> list[list[Round]]:
        program = _of_loader(self.program, self.case.layout)
        loader = make_loader(program, self.rows)
        rounds = rounds_of(program, layout, loader, iter(loader), epoch=epoch)
        size = 1 if layout.parity != "off" else program.accumulation
        return [rounds[i : i + size] for i in range(0, len(rounds), size)]

    def _evaluate(self, data: Named | None = None) -> None:
        program, expected = self.program, self.expected
        data = self.evaluation if data is None else data
        batch = data.batch(list(range(len(data))))
        with torch.no_grad():
            expected.evaluations.append(prediction_of(self.model(batch["x"], batch["token"]))[:, 0].clone())
            ((loss, num_items),) = losses_of(program, self.model, batch)
        # Where it is divided by labels, a mean over all of them in the exact modes, else over rounds of batches.
        is_told = not counts_items(program) or self.case.layout.parity != "off"
        is_told = is_told and num_items != 0.0
        expected.evaluation_losses.append(float(loss) if is_told else math.nan)


def _of_loader(program: Program, first: Layout) -> Program:
    """Return the program with what its loader has; ``first``: of the first start, which says the batch of all processes."""
    changed = replace(program, seedable=True, num_workers=0)
    if program.data == "iterable":
        changed = replace(changed, drop_last=False)  # dataloader_drop_last is for data with an index
    if first.parity != "off" and not program.says_global:
        changed = replace(changed, batch_size=program.batch_size * program.accumulation * first.world_size)
    return changed
