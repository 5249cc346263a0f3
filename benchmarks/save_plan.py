"""Measures what a save costs each rank besides writing its data, by simulation: which rank writes what, and the manifest.

Run ``python benchmarks/save_plan.py [--ranks N ...] [--tensors N] [--write]``. One process plays rank zero and then another rank of
a save by thousands; what the other ranks would send is computed beforehand. The tensors are tiny, so that the rest is measured.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from results import footer, publish, verdict

from echelon.checkpoint.plan import Planner
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import ShardPart
from echelon.checkpoint.save import Content, PendingCheckpoint
from echelon.world.world import World

TITLE = "## Planning a save"
RANKS_PER_NODE = 8
LIMITS = {0: (5.0, 500.0), 1: (0.2, 20.0)}
"""Seconds of CPU and megabytes of each save after the first, for rank zero and for any other rank."""


def content_of(rank: int, num_ranks: int, num_tensors: int, *, is_sharded: bool) -> Content:
    """Return a rank's share of a state whose tensors have a row for each rank (sharded), or the whole state."""
    names = [f"models.0.layers.{i // 9}.block.{i % 9}.weight" for i in range(num_tensors)]
    shape = (num_ranks, 4) if is_sharded else (1, 4)
    values = torch.zeros(1, 4)
    offset = (rank, 0) if is_sharded else (0, 0)
    return Content(
        tensors={name: ShardPart(shape, offset, values.clone()) for name in names},
        objects={"accelerator": {"step": 1}, "optimizer_groups": [[{"lr": 0.1, "params": names}]]},
        rank_objects={"random": {"seed": rank}},
        progress={"step": 1},
    )


class Others:
    """What all ranks send in each step of a save."""

    def __init__(self, num_ranks: int, num_tensors: int, *, is_sharded: bool) -> None:
        self._num_ranks = num_ranks
        self._sent: list[bytes] = []
        self._digests: list[str] = []
        for rank in range(num_ranks if is_sharded else 1):
            planner = Planner()
            content = content_of(rank, num_ranks, num_tensors, is_sharded=is_sharded)
            self._digests.append(planner.describe(content.tensors, may_differ=())[0])
            self._sent.append(zlib.compress(planner._description, 1))
        if not is_sharded:
            self._digests *= num_ranks
            self._sent += [b""] * (num_ranks - 1)
        self._of_rank_zero: list[list[bytes]] = []
        """What rank zero sent, by save and step."""

    def gather(self, rank: int, save: int, folder: Path, spent: Spent) -> Callable[[bytes], list[bytes]]:
        """Return the ``gather`` of a simulated rank in a save."""
        if rank == 0:
            self._of_rank_zero.append([])
        step = 0

        def gather(payload: bytes) -> list[bytes]:
            nonlocal step
            spent.stop()
            if rank == 0:
                self._of_rank_zero[save].append(payload)
            everything = [self._of_rank_zero[save][step], *self._from_others(payload)]
            everything[rank] = payload
            if rank and step == 0:  # rank zero has made the folder
                token = json.loads(everything[0])[0][0]
                (folder / f"save_{rank}.tmp-{token}").mkdir()
            step += 1
            spent.num_bytes += sum(map(len, everything))
            spent.start()
            return everything

        return gather

    def _from_others(self, payload: bytes) -> list[bytes]:
        """Return what the ranks from rank one on send, in a step in which a rank sends ``payload``."""
        others = range(1, self._num_ranks)
        if payload[:1] == b"x" or not payload:  # a compressed description, or none
            return self._sent[1:]
        sent = json.loads(payload)
        if isinstance(sent, list):  # who is there
            return [json.dumps([None, rank // RANKS_PER_NODE, sent[2]]).encode() for rank in others]
        result = sent["result"] if isinstance(sent, dict) else None
        if isinstance(result, list) and result and len(result[0]) == 32 and len(result) == 2:  # digest and key
            return [json.dumps({**sent, "result": [self._digests[rank], result[1]]}).encode() for rank in others]
        if isinstance(result, dict):  # the files
            facts = [12345, "0" * 32]
            return [
                json.dumps(
                    {**sent, "result": {f"rank_{rank:05}.safetensors": facts, f"rank_{rank:05}.json": facts}}
                ).encode()
                for rank in others
            ]
        answer = payload if sent == 1 else json.dumps({**sent, "result": None}).encode()
        return [answer] * len(others)


class Spent:
    """CPU time of a rank's own work, and the bytes that it received."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.num_bytes = 0

    def start(self) -> None:
        self._began = time.process_time()

    def stop(self) -> None:
        self.cpu_s += time.process_time() - self._began


def save(others: Others, rank: int, number: int, content: Content, planner: Planner, num_ranks: int, at: Path) -> Spent:
    """Save as ``rank``, and return what it costs."""
    spent = Spent()
    world = World(
        rank=rank,
        local_rank=rank,
        world_size=num_ranks,
        local_world_size=RANKS_PER_NODE,
        node_rank=0,
        device=torch.device("cpu"),
        backend="gloo",
    )
    pending = PendingCheckpoint(
        target=at / f"save_{rank}",
        world=world,
        collect=lambda _: content,
        planner=planner,
        gather=others.gather(rank, number, at, spent),
    )
    spent.start()
    pending.begin().finish()
    spent.stop()
    return spent


def measure(num_ranks: int, num_tensors: int, *, is_sharded: bool, num_later: int = 3) -> list[list[Any]]:
    """Return the costs of rank zero and of rank one: CPU and bytes received of the first save and of a later one, and bytes kept."""
    others = Others(num_ranks, num_tensors, is_sharded=is_sharded)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            planner, content = Planner(), content_of(rank, num_ranks, num_tensors, is_sharded=is_sharded)
            saves = [
                save(others, rank, number, content, planner, num_ranks, Path(folder)) for number in range(num_later + 1)
            ]
            later = max(saves[1:], key=lambda spent: spent.cpu_s)
            kept = len(planner.layouts) + 8 * len(planner._own)
            rows.append([rank, saves[0].cpu_s, saves[0].num_bytes, later.cpu_s, later.num_bytes, kept])
        began = time.process_time()
        Checkpoint(Path(folder) / "save_0")
        rows[0].append(time.process_time() - began)
    return rows


def section(sizes: Sequence[int], num_tensors: int) -> str:
    """Return the measurement as a section of RESULTS.md."""
    lines, holds = [], {0: True, 1: True}
    for is_sharded in (False, True):
        for num_ranks in sizes:
            for rank, first_s, first_bytes, later_s, later_bytes, kept, *reading in measure(
                num_ranks, num_tensors, is_sharded=is_sharded
            ):
                seconds, megabytes = LIMITS[rank]
                holds[rank] &= later_s <= seconds and (later_bytes + kept) / 1e6 <= megabytes
                name = "rank zero" if rank == 0 else "any other"
                lines.append(
                    f"| {'sharded' if is_sharded else 'replicated'} | {num_ranks:,} | {name} | {first_s:.2f} | {first_bytes / 1e6:.2f} | "
                    f"{later_s:.3f} | {later_bytes / 1e6:.2f} | {kept / 1e6:.2f} | {f'{reading[0]:.2f}' if reading else ''} |"
                )
                print(lines[-1], flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return "\n".join(
        [
            TITLE,
            "",
            f"{num_tensors} tiny tensors, simulated ranks, each save over the one before. CPU in seconds (later: the slowest of three "
            "saves), messages received and kept plan in MB.",
            f"Rank zero's plan of the first save takes the most memory; the whole program, with all simulated ranks, took {peak:.1f} GB.",
            "",
            "| tensors | ranks | | first save, CPU | received | later save, CPU | received | kept | reading the manifest, CPU |",
            "|---|---:|---|---:|---:|---:|---:|---:|---:|",
            *lines,
            "",
            f"- after the first save at most {LIMITS[1][0]} s of CPU and {LIMITS[1][1]:.0f} MB for any rank but the first: {verdict(holds[1])}",
            f"- at most {LIMITS[0][0]:.0f} s and {LIMITS[0][1]:.0f} MB for rank zero: {verdict(holds[0])}",
            "",
            footer("save_plan.py"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--tensors", type=int, default=900)
    parser.add_argument("--write", action="store_true", help="replace the section in RESULTS.md")
    arguments = parser.parse_args()
    publish(section(arguments.ranks, arguments.tensors), is_written=arguments.write)


if __name__ == "__main__":
    main()
