"""Measures the memory of a dataset on one machine, with one copy for all ranks (`share_dataset`) and with one copy per rank.

The measure is the sum of PSS over the ranks (/proc/self/smaps_rollup): a page mapped by k processes counts 1/k in each of them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from results import footer, publish
from torch.utils.data import TensorDataset

from echelon import share_dataset
from echelon.distributed import process_group, spawn

RANKS = 4
SHARED, OWN = "one copy, `share_dataset`", "one copy per rank"
LIMIT = 1.2
ROLLUP = Path("/proc/self/smaps_rollup")


def total_pss() -> int:
    """Return the total bytes of all ranks."""
    dist.barrier()
    (line,) = (line for line in ROLLUP.read_text().splitlines() if line.startswith("Pss:"))
    total = torch.tensor(int(line.split()[1]) * 1024)
    dist.all_reduce(total)
    return int(total)


def measure(rank: int, share: bool, megabytes: int, result: str) -> None:
    with process_group():
        before = total_pss()
        data = TensorDataset(torch.ones(megabytes * 2**20 // 4))
        if share:
            data = share_dataset(data)
        assert all(part.min() == 1.0 for part in data.tensors[0].split(2**20))  # every rank reads all of it
        grown = total_pss() - before
    if rank == 0:
        Path(result).write_text(str(grown / 2**20))


def run(function: Callable[..., None], *args: object) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        spawn(function, args=(*args, str(result)), nprocs=RANKS)
        return float(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    options = parser.parse_args()
    if not ROLLUP.exists():
        print("!! no /proc/self/smaps_rollup: PSS requires Linux, nothing is measured.")
        return
    grown = {name: run(measure, name == SHARED, options.megabytes) for name in (SHARED, OWN)}
    rows = [f"| {name} | {size:.0f} | {size / options.megabytes:.2f} |" for name, size in grown.items()]
    ratio = grown[SHARED] / options.megabytes
    section = f"""## Memory of a dataset

The growth of the sum of PSS over {RANKS} ranks of one machine that all read a tensor of {options.megabytes} MB.

| | MB | multiple of the data |
|---|---:|---:|
{chr(10).join(rows)}

- one copy takes {ratio:.2f} x the size of the data (target: {LIMIT}, {"met" if ratio < LIMIT else "missed"})

{footer("shared_memory.py")}"""
    publish(section, is_written=options.write)
    sys.exit(ratio >= LIMIT)


if __name__ == "__main__":
    main()
