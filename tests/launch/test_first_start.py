"""The first ranks are forked from a process that imports torch while the launcher does, if that makes no difference to the script."""

from __future__ import annotations

import pytest

from tests.launch.conftest import Command

SUM = """
import sys
HAS_TORCH = "torch" in sys.modules
{line}
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print(f"sum {{int(x)}}, torch imported: {{HAS_TORCH}}, threads: {{torch.get_num_threads()}}, {{__name__}}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("line", "flags", "is_forked"),
    [
        ("", [], True),
        ("", ["--no_warm"], False),
        ("import os; os.environ['OMP_NUM_THREADS'] = '2'", [], False),
    ],
)
def test_ranks_are_forked_only_where_that_makes_no_difference(
    command: Command, line: str, flags: list[str], is_forked: bool
) -> None:
    command.is_warm = True
    command.write("train.py", SUM.format(line=line))
    found = command.launch("-q", "--cpu", "--num_processes=2", *flags, "train.py", OMP_NUM_THREADS="1")
    assert found.code == 0, found.err
    threads = 2 if line else 1
    assert found.out.count(f"sum 2, torch imported: {is_forked}, threads: {threads}, __main__") == 2


def test_forked_ranks_draw_different_numbers_as_new_programs_do(command: Command) -> None:
    """Without a seed, each process has random generators of its own; equal ones would give all ranks the same dropout masks."""
    command.is_warm = True
    command.write(
        "train.py",
        "import torch, random, sys\nimport numpy as np\n"
        "draws = torch.rand(1).item(), np.random.rand(), random.random()\n"
        "sys.stdout.write(' '.join(map(str, draws)) + '\\n')\n",
    )
    found = command.launch("-q", "--cpu", "--num_processes=2", "train.py", OMP_NUM_THREADS="1")
    assert found.code == 0, found.err
    first, second = (line.split()[-3:] for line in found.out.splitlines())
    assert [name for name, a, b in zip(("torch", "numpy", "random"), first, second, strict=True) if a == b] == []


def test_a_failure_of_a_forked_first_rank_is_explained(command: Command) -> None:
    command.is_warm = True
    command.write("train.py", "import torch\ntorch.ones(2) + torch.ones(3)\n")
    found = command.launch("-q", "--cpu", "--num_processes=2", "train.py", OMP_NUM_THREADS="1")
    assert found.code == 1
    assert "train.py:2" in found.err
    assert "The size of tensor a (2) must match" in found.err
