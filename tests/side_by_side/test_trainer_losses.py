"""Three epochs with transformers' Trainer and with echelon's have the same loss at every batch and step, on one and two processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import rendezvous
from tests.side_by_side.run import HERE

LIMIT = 1e-6
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Train = Callable[[str, str, int, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, peers: Path) -> Iterator[Train]:
    """(library, model, samples, ranks) -> the results of each rank."""
    errors = tmp_path_factory.mktemp("losses") / "stderr"
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    environment |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [str(peers), str(HERE / "trainer_losses.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    jobs, answers = process.stdin, process.stdout

    def run(library: str, model: str, n: int, world_size: int) -> list[dict[str, Any]]:
        with rendezvous(init_group=world_size == 1) as variables:
            places: list[dict[str, Any]] = [{}]
            if world_size > 1:
                places = [
                    {"RANK": r, "WORLD_SIZE": world_size, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": world_size, **variables}
                    for r in range(world_size)
                ]
            environs = [{name: str(value) for name, value in place.items()} for place in places]
            folder = str(tmp_path_factory.mktemp(library))
            job = {"library": library, "model": model, "samples": n, "folder": folder, "environs": environs}
            jobs.write(json.dumps(job) + "\n")
            jobs.flush()
            found = json.loads(answers.readline() or "[null]")
        assert None not in found, errors.read_text()
        return list(found)

    try:
        yield run
    finally:
        process.communicate()  # closes its pipes, so that it exits


@pytest.mark.parametrize("model", ["bert", "gpt2"])
@pytest.mark.parametrize(("world_size", "n"), [(1, 46), (2, 56), (2, 50)])
def test_every_loss_is_that_of_transformers(train: Train, model: str, world_size: int, n: int) -> None:
    # 12 batches of 4 per epoch, or 7 on each of two ranks: the last update of each epoch is shorter than the others.
    theirs, ours = (train(library, model, n, world_size) for library in ("transformers", "echelon"))
    for mine, its in zip(ours, theirs, strict=True):
        assert mine["steps"] == its["steps"] > 8
        assert mine["losses"] == pytest.approx(its["losses"], rel=0, abs=LIMIT)
        assert len({round(loss, 4) for loss in its["losses"]}) > 10
        assert len(mine["logs"]) == len(its["logs"]) == its["steps"]
        for found, expected in zip(mine["logs"], its["logs"]):
            for name in ("loss", "grad_norm", "learning_rate", "epoch"):
                assert found[name] == pytest.approx(expected[name], rel=0, abs=LIMIT), (name, expected["step"])
        assert mine["weights"] == pytest.approx(its["weights"], rel=LIMIT, abs=1e-5)  # sums of up to 640 weights
