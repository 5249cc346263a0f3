"""A drawn program as a script on torch's own DistributedDataParallel (level 1), between ``setup()`` and ``cleanup()``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.distributed import gather_object, mean_over_ranks, reduce, setup, shard
from tests.programs.loop import Found
from tests.programs.parts import (
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
from tests.programs.program import Layout, Program


def train(program: Program, layout: Layout) -> Found:
    """Run the program on this rank; the process group is one of ``setup()``."""
    world = setup()
    assert world.world_size == layout.world_size
    return _Script(program, world).run()


class _Script:
    def __init__(self, program: Program, world: Any) -> None:
        self.program, self.world = program, world
        self.found = Found()
        torch.manual_seed(program.seed)
        loader = make_loader(program, Rows(program), world=(world.rank, world.world_size))
        is_seeded = program.seedable and not program.already_sharded
        options: dict[str, Any] = {"seed": program.seed + 3} if is_seeded else {}
        if program.order == "sequential" and not program.already_sharded:
            options["even"] = True  # a training; a loader that does not shuffle is taken for one of an evaluation
        self.loader: Any = shard(loader, **options)
        self.evaluation_loader: Any = shard(
            make_evaluation_loader(program, Rows(program, num_samples=5 + program.seed % 7, seed=900))
        )
        model = make_model(program)
        if program.made == "before":
            self.optimizers = make_optimizers(program, model)
        self.model = DistributedDataParallel(model.to(world.device))
        if program.made == "after":
            self.optimizers = make_optimizers(program, self.model)
        schedules = [make_schedule(program, optimizer) for optimizer in self.optimizers]
        self.schedules = [schedule for schedule in schedules if schedule is not None]

    def run(self) -> Found:
        program, found = self.program, self.found
        for epoch in range(program.epochs):
            if program.unfreezes is not None and epoch >= program.unfreezes:
                for parameter in self.model.parameters():
                    parameter.requires_grad_(True)
            found.epochs.append([])
            self._epoch()
            if program.evaluates == "epoch":
                self._evaluate()
        found.num_steps = len(found.rates)
        found.weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        return found

    def _epoch(self) -> None:
        program, num_batches, updates, total = self.program, len(self.loader), 0, 0.0
        for number, batch in enumerate(self.loader):
            if program.skips and number % 3 == 1:
                continue
            batch = fields_of(batch)
            self.found.epochs[-1] += [i for each in gather_object([batch.index.tolist()]) for i in each]
            place = number % program.accumulation
            window = min(program.accumulation, num_batches - (number - place))
            is_last = place + 1 == window
            with nullcontext() if is_last else self.model.no_sync():
                if program.closure:
                    for optimizer in self.optimizers:
                        optimizer.step(partial(self._backward, batch, window, clears=True))
                else:
                    total += float(self._backward(batch, window, clears=program.clears_first and place == 0))
            if not is_last:
                continue
            if not program.closure:
                self.found.losses.append(total)
                total = 0.0
                self._step()
            for schedule in self.schedules:
                schedule.step()
            self.found.rates.append(float(self.optimizers[0].param_groups[-1]["lr"]))
            updates += 1
            if program.evaluates == "middle" and updates == 1:
                self._evaluate()
            if updates == program.breaks:
                return

    def _step(self) -> None:
        program = self.program
        if program.clipping == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.02)
        elif program.clipping != "none":
            kind = float("inf") if program.clipping == "inf" else 2.0
            self.found.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.05, kind)))
        for optimizer in self.optimizers:
            optimizer.step()
        if not program.clears_first:
            self._clear()

    def _clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.program.set_to_none)

    def _backward(self, batch: Any, window: int, *, clears: bool) -> torch.Tensor:
        """Return the loss of all ranks."""
        program = self.program
        if clears:
            self._clear()
        losses = list(losses_of(program, self.model, batch))
        if program.loss == "items":
            ((mean, num_items),) = losses
            assert num_items is not None
            # A batch without items: the others wait for this rank's gradients, which are zero.
            total = mean * num_items if num_items else prediction_of(self.model(batch.x, batch.token)).sum() * 0.0
            everybody = float(reduce(torch.tensor(num_items), "sum"))
            loss = total * self.world.world_size / max(everybody, 1.0)  # DDP takes the mean over the ranks
        else:
            loss = torch.stack([loss for loss, _ in losses]).sum() / window
        if program.peeks:
            with torch.no_grad():
                self.model(batch.x, batch.token)
        loss.backward()  # type: ignore[no-untyped-call]
        mean_loss: torch.Tensor = mean_over_ranks(loss.detach())
        return mean_loss

    def _evaluate(self) -> None:
        self.model.eval()
        num_samples = len(self.evaluation_loader.dataset)
        predictions = torch.zeros(num_samples, dtype=torch.float64)
        counts = torch.zeros(num_samples, dtype=torch.int64)
        with torch.no_grad():
            for batch in self.evaluation_loader:
                batch = fields_of(batch)
                predictions[batch.index] = prediction_of(self.model(batch.x, batch.token))[:, 0].double()
                counts[batch.index] += 1
        self.model.train()
        predictions, counts = reduce((predictions, counts), "sum")
        self.found.evaluated.append([i for i, count in enumerate(counts.tolist()) for _ in range(count)])
        self.found.evaluations.append(predictions)
