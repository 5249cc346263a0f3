"""The time of a step is attributed to this rank's work or to waiting for a late rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base import environ
from echelon.status.board import Board, StepPart
from echelon.world.launch_variables import BOARD_VARIABLE
from tests.harness import run_on_ranks
from tests.quiet import wait_until_quiet

NAP_S, STEPS = 0.05, 6


def nap_while_it_waits(pid: int) -> None:
    """Sleep when the other rank has come to where it waits for this one: on a busy machine it may be late itself."""
    wait_until_quiet(pid)
    time.sleep(NAP_S)


def train(path: str) -> None:
    rank = int(environ.get("RANK") or 0)
    with environ.patch({BOARD_VARIABLE: f"{path}:{rank}"}):
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(TensorDataset(torch.ones(8 * STEPS, 4)), batch_size=4)
        model = torch.nn.Linear(4, 4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
        others = accelerator.gather(torch.tensor([os.getpid()])).tolist()
        for (x,) in loader:
            loss = model(x).sum()
            if rank == 1:
                nap_while_it_waits(others[0])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                nap_while_it_waits(others[1])
            accelerator.gather(loss)
        accelerator.end_training()


def test_waiting_in_a_backward_pass_or_gather_counts_as_communication(tmp_path: Path) -> None:
    board = Board(2, folder=str(tmp_path))
    try:
        run_on_ranks(train, board.path, world_size=2, init_group=False)
        times = [board.times(rank) for rank in (0, 1)]
    finally:
        board.remove()
    slept = STEPS * NAP_S
    for found in times:
        assert found is not None
        spent = {part: found.spent_ns[part] / 1e9 for part in StepPart}
        assert found.num_steps == STEPS
        # Its own naps, and the other's. The machine may be busy, so that a nap is longer than it was meant; never shorter.
        assert spent[StepPart.OTHER] >= slept * 0.9
        assert spent[StepPart.FORWARD] > 0
        assert spent[StepPart.COMMUNICATION] >= slept * 0.9
        assert sum(found.spent_ns) == found.since_ns - found.begun_ns
