"""A drawn program in one process of plain PyTorch: what the layout's mode promises."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tests import reference
from tests.programs.parts import (
    Batch,
    Rows,
    fields_of,
    losses_of,
    make_evaluation_loader,
    make_loader,
    make_model,
    make_optimizers,
    make_schedule,
    prediction_of,
)
from tests.programs.program import Case, Layout, Program
from tests.reference import PlainLoop, Round

ORDER_SEED = 31  # of the exact modes; added to the program's
ZIPPED_SEED = 500


@dataclass
class Expected:
    """What the run must find; a list has an entry for each update unless it says otherwise."""

    weights: list[torch.Tensor]
    losses: list[float]
    norms: list[float]
    rates: list[float]
    epochs: list[list[int]]
    """The samples of each epoch, each as often as it counts."""
    evaluations: list[torch.Tensor] = field(default_factory=list)
    """Predictions for the evaluation data, one for each evaluation."""
    evaluation_losses: list[float] = field(default_factory=list)
    """Of a Trainer; nan: nothing is said of it."""
    num_steps: int | None = None
    """Updates that the weights have; None: as many as learning rates."""


def run_plainly(case: Case) -> Expected:
    """Run the case's program to its end."""
    return _Plain(case).run()


class _Plain:
    def __init__(self, case: Case) -> None:
        self.case, self.program = case, replace(case.program, num_workers=0)
        program = self.program
        torch.manual_seed(program.seed)
        self.rows = Rows(program)
        self.model = make_model(program)
        optimizers = make_optimizers(program, self.model)
        schedules = [make_schedule(program, optimizer) for optimizer in optimizers]
        layout = case.layout
        self.loop = PlainLoop(
            self.model,
            self._losses,
            optimizers,
            schedules=[s for s in schedules if s is not None],
            schedule_steps=_schedule_steps(program, layout),
            clip=clip_of(program),
            calls_closure=program.closure,
        )
        self.loader = make_loader(program, self.rows)
        self.evaluation_rows = Rows(program, num_samples=5 + program.seed % 7, seed=900)
        self.evaluation_loader = make_evaluation_loader(program, self.evaluation_rows)
        self.zipped_rows = Rows(program, seed=ZIPPED_SEED)
        self.zipped_loader = make_loader(zipped_program(program), self.zipped_rows, batch_size=program.zipped or 1)
        self.evaluations: list[torch.Tensor] = []
        self.seen: list[list[int]] = []
        self.at_first_batch: torch.Tensor | None = None  # the state of the loader's own generator
        self.num_steps = 0
        self.num_windows = 0
        self.saved: Any = None
        self.has_returned = False

    def run(self) -> Expected:
        program = self.program
        step, window = 0, []
        for epoch in range(program.epochs):
            if program.unfreezes == epoch:
                for parameter in self.model.parameters():
                    parameter.requires_grad_(True)
            layout = self.layout
            self.loop.schedule_steps = _schedule_steps(program, layout)
            rounds = self._rounds(epoch, layout)
            accumulation = 1 if layout.parity != "off" else program.accumulation
            seen: list[int] = []
            updates, is_last = 0, False
            for number, round_ in enumerate(rounds):
                is_last = number == len(rounds) - 1
                if program.skips and number % 3 == 1:
                    continue
                seen += [index for piece in round_ for index in piece]
                window.append(round_)
                step += 1
                if self._returns_now(step):
                    window, step = [], 0
                    self._load()
                    continue
                is_left = program.breaks_within and updates == program.breaks
                if not is_last and step % accumulation:
                    if is_left:
                        break
                    continue
                step = 0 if is_last else step
                steps = not (program.leaves_out and self.num_windows % 3 == 1)
                self.loop.update(window, steps=steps)
                window, updates = [], updates + 1
                self.num_steps += steps
                self.num_windows += 1
                if self.num_windows == 1 and program.returns != "no":
                    self._save()
                if program.returns == "update" and self.num_windows == program.returns_after:
                    self._load()
                if program.evaluates == "middle" and updates == 1:
                    self._evaluate()
                if is_left or (updates == program.breaks and not program.breaks_within):
                    if not is_last:
                        self._leave_pass()
                    break
            self.seen.append(seen)
            # "What the body of the loop still had to do is not made up for" after a save at the end of an epoch
            # (docs/checkpoints.md), and so is the number that the evaluation's loader draws.
            is_left_out = is_last and len(self.loop.updates) == program.saves
            if program.evaluates == "epoch" and not is_left_out:
                self._evaluate()
        return Expected(
            weights=[p.detach() for p in self.model.parameters()],
            losses=self.loop.found_losses,
            norms=self.loop.found_norms,
            rates=self.loop.found_rates,
            epochs=self.seen,
            evaluations=self.evaluations,
            num_steps=self.num_steps,
        )

    def _returns_now(self, step: int) -> bool:
        """Tell whether micro-step ``step``, counted from 1, goes back to the checkpoint."""
        program = self.program
        is_near = program.returns in ("window", "nan") and self.num_windows == program.returns_after
        if not is_near or self.has_returned:
            return False
        is_off = self.case.layout.parity == "off"
        self.has_returned = not is_off or (step - 1 - program.seed) % program.accumulation == 0
        return self.has_returned

    def _save(self) -> None:
        parts = [self.model, *self.loop.optimizers, *self.loop.schedules]
        self.saved = self.num_steps, torch.get_rng_state(), copy.deepcopy([part.state_dict() for part in parts])

    def _load(self) -> None:
        parts = [self.model, *self.loop.optimizers, *self.loop.schedules]
        self.num_steps, random_state, states = copy.deepcopy(self.saved)
        torch.set_rng_state(random_state)
        for part, state in zip(parts, states):
            part.load_state_dict(state)

    @property
    def layout(self) -> Layout:
        """That of the second start, once the first one has ended."""
        program, case = self.program, self.case
        has_saved = program.saves is not None and len(self.loop.updates) >= program.saves
        return case.other if has_saved and case.other is not None else case.layout

    def _rounds(self, epoch: int, layout: Layout) -> list[Round]:
        pass_, generator = iter(self.loader), getattr(self.loader.sampler, "generator", None)
        self.at_first_batch = None if generator is None else generator.get_state()
        rounds = rounds_of(self.program, layout, self.loader, pass_, epoch=epoch)
        if self.program.splits == "counted":
            rounds = [piece for round_ in rounds for piece in _split(round_)]
        if not self.program.zipped:
            return rounds
        # One after the other: a prepared loader draws its order with its first batch (docs/parity.md, "Limitations").
        others = rounds_of(
            zipped_program(self.program), layout, self.zipped_loader, iter(self.zipped_loader), epoch=epoch
        )
        if len(rounds) > len(others):
            self._leave_pass()
        both = []
        for one, other in zip(rounds, others):
            both.append([[*a, *(-1 - i for i in b)] for a, b in zip(one, other)])
        return both

    def _leave_pass(self) -> None:
        """Take back what the sampler draws at the end of its samples: a pass that is left does not come there."""
        if self.at_first_batch is not None:
            generator = self.loader.sampler.generator
            generator.set_state(self.at_first_batch)
            torch.randperm(self.program.num_samples, generator=generator)

    def _losses(self, piece: list[int]) -> Iterator[tuple[torch.Tensor, float | None]]:
        program = self.program
        mine = [i for i in piece if i >= 0]
        if mine:
            yield from losses_of(program, self.model, self.rows.batch(mine, program))
        if program.zipped and len(mine) < len(piece):
            batch = self.zipped_rows.batch([-1 - i for i in piece if i < 0], program)
            yield from zipped_losses(program, self.model, batch)

    def _evaluate(self) -> None:
        for batch in self.evaluation_loader:
            fields_of(batch)
        with torch.no_grad():
            whole = self.evaluation_rows.batch(list(range(len(self.evaluation_rows))), self.program)
            self.evaluations.append(prediction_of(self.model(whole.x, whole.token))[:, 0].clone())


def _split(round_: Round) -> list[Round]:
    """Split the batch of each rank in two, as ``torch.chunk`` does."""
    half = [-(-len(piece) // 2) for piece in round_]
    rounds = [[piece[:n] for piece, n in zip(round_, half)], [piece[n:] for piece, n in zip(round_, half)]]
    return [one for one in rounds if any(one)]


def zipped_losses(program: Program, model: nn.Module, batch: Batch) -> Iterator[tuple[torch.Tensor, float | None]]:
    """Yield the loss of the second loader's batch."""
    yield prediction_of(model(batch.x, batch.token)).square().mean() * 0.1, None


def zipped_program(program: Program) -> Program:
    plain: dict[str, Any] = {"subclass": False, "beside": "no"}
    return replace(program, order="sequential", data="map", drop_last=False, already_sharded=False, **plain)


def rounds_of(program: Program, layout: Layout, loader: Any, pass_: Iterator[Any], *, epoch: int) -> list[Round]:
    """Return what the ranks have in each iteration of an epoch's loop; ``pass_`` is one over the plain ``loader``."""
    world_size = layout.world_size
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    drawn = [fields_of(batch).index.tolist() for batch in pass_]
    if layout.parity != "off":
        if program.order in ("shuffle", "generator"):
            order = reference.permutation(program.num_samples, seed=program.seed + ORDER_SEED, epoch=epoch)
            batches = reference.batches_of(order, program.batch_size, drop_last=program.drop_last)
        else:
            batches = drawn
        return [[batch] for batch in batches]
    if program.seedable and program.order in ("shuffle", "generator"):
        seed = program.seed
        order = reference.permutation(program.num_samples, seed=seed, epoch=epoch)
        batches = reference.batches_of(order, program.batch_size, drop_last=program.drop_last)
    else:
        batches = drawn
    even, split = program.even_batches, program.split_batches
    if world_size == 1:
        return [[batch] for batch in batches]
    if program.already_sharded:
        return rounds_of_own_cut(program, world_size, loader.batch_size)
    dispatches = program.data == "iterable" if program.dispatches is None else program.dispatches
    sizes = {"batch_sampler": None, "buckets": program.batch_size}  # such a loader has no batch size
    size = sizes.get(program.order, loader.batch_size)
    if dispatches:
        return reference.dispatched_batches(
            batches, world_size=world_size, even=even, split=split, drop_last=program.drop_last
        )
    if program.data == "iterable":
        return reference.streamed_batches(
            list(range(program.num_samples)),
            world_size=world_size,
            batch_size=loader.batch_size,
            even=even,
            split=split,
            drop_last=program.drop_last,
        )
    if split:
        return reference.cut_batches(batches, world_size=world_size, batch_size=size, even=even)
    return reference.dealt_batches(
        batches, world_size=world_size, batch_size=size, even=even, drop_last=program.drop_last
    )


def rounds_of_own_cut(program: Program, world_size: int, batch_size: int) -> list[Round]:
    """Return the rounds of data that the script cut itself: sample i belongs to rank i % W, and the first ones complete the rest."""
    samples = list(range(program.num_samples))
    samples += (samples * world_size)[: -len(samples) % world_size]
    by_rank = [
        reference.batches_of(samples[rank::world_size], batch_size, drop_last=program.drop_last)
        for rank in range(world_size)
    ]
    return [list(round_) for round_ in zip(*by_rank)]


def _schedule_steps(program: Program, layout: Layout) -> int:
    follows = layout.parity == "off" and not program.split_batches and program.is_prepared
    return layout.world_size if follows else 1


def clip_of(program: Program) -> Any:
    """Return torch's own clipping function of the program; None: it clips nothing."""
    if program.clipping == "norm":
        return lambda p: nn.utils.clip_grad_norm_(p, 0.05)
    if program.clipping == "inf":
        return lambda p: nn.utils.clip_grad_norm_(p, 0.05, float("inf"))
    if program.clipping == "value":
        return lambda p: nn.utils.clip_grad_value_(p, 0.02)
    return None
