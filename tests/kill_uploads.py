"""A program for tests/unit/checkpoint/test_object_store_faults.py: a run that saves to an object store is killed at random requests.

The runs are forked from this process, which has imported but not used torch and obstore. Two ranks of each run are threads. Each
run takes over the lock of the one before, resumes, and saves until the server kills it.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from typing import Any

from echelon.base.errors import CheckpointError
from echelon.checkpoint import storage
from echelon.checkpoint.commit import clean
from echelon.checkpoint.lock import RunLock
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.rotation import numbered, remove_oldest
from echelon.checkpoint.save import save
from tests.checkpoint_ranks import content_of, on_threads
from tests.object_server import FAULTS, VARIABLES, order

PREFIX = "checkpoint_"
NUM_SAVES = 4  # of a run, if it is not killed


def newest_step(run: Any) -> int:
    """Return the number of the newest checkpoint that passes all checks and has the contents that were saved; 0 if none."""
    for path in reversed(numbered(run, prefix=PREFIX)):
        try:
            checkpoint = Checkpoint(path)
            if checkpoint.problems():
                continue
        except CheckpointError:
            continue
        number = int(path.name.removeprefix(PREFIX))
        if checkpoint.objects() != {"step": number}:
            raise AssertionError(f"{path} has the contents of another checkpoint")
        return number
    return 0


def _run(url: str, reported: int, reports: int) -> None:
    """Resume and save; write the number of each checkpoint to ``reports`` as soon as it is reported as saved."""
    run = storage.location(url)
    start = newest_step(run)
    if start < reported:
        raise AssertionError(f"checkpoint {reported} was reported as saved, but the newest one is {start}")
    lock = RunLock(run / ".lock")
    clean(run, belongs=lambda name: name.startswith(PREFIX))
    for number in range(start + 1, start + 1 + NUM_SAVES):
        target = run / f"{PREFIX}{number}"

        def save_one(world: Any, gather: Any, target: Any = target, number: int = number) -> None:
            save(target, content_of(number, world.rank), world=world, gather=gather, fence=lock.require)

        on_threads(save_one, 2)
        os.write(reports, b"%d\n" % number)
        remove_oldest(run, prefix=PREFIX, limit=2)
    lock.release()


def main(endpoint: str, num_kills: int, share: float, seed: int) -> None:
    """Kill runs until ``num_kills`` have been killed; print that number, the number of saves, and the faults."""
    os.environ.update(VARIABLES, AWS_ENDPOINT_URL=endpoint)
    draw, reported, kills, saves, faults = random.Random(seed), 0, 0, 0, dict.fromkeys(FAULTS, 0)
    url = f"s3://bucket/kills{seed}"
    while kills < num_kills:
        read, write = os.pipe()
        go_read, go_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.read(go_read, 1)  # until the server knows whom to kill
                _run(url, reported, write)
                code = 0
            except BaseException:  # noqa: BLE001 - the process exits here
                traceback.print_exc()
            finally:
                os._exit(code)
        # A run without faults sends some 200 requests.
        order(
            endpoint, share=share, seed=draw.random(), victim=pid, at=draw.randint(1, 200), is_done=draw.random() < 0.5
        )
        os.close(write)
        os.write(go_write, b"x")
        with os.fdopen(read) as reports:
            numbers = [int(line) for line in reports if line.endswith("\n")]
        _, status = os.waitpid(pid, 0)
        os.close(go_read)
        os.close(go_write)
        reported, saves = numbers[-1] if numbers else reported, saves + len(numbers)
        counters = order(endpoint)
        faults = {name: faults[name] + counters[name] for name in FAULTS}
        if os.WIFSIGNALED(status):
            kills += 1
        elif status != 0:
            raise SystemExit(f"run after {kills} kills failed; last reported: {reported}")
    print(kills, saves, faults, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
