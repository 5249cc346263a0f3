"""A rank whose memory is limited: its error names the largest tensors, where they are from, and one switch."""

from __future__ import annotations

import sys

import pytest

from tests.launch.conftest import Command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit of the address space is Linux's")

SCRIPT = """
import resource, sys, torch
from torch import nn
from echelon import Accelerator

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 8192), nn.Linear(8192, 1024)

    def forward(self, x):
        hidden = self.up(x)
        if sys.argv[1] == "forward":
            many = torch.zeros(128, 2**20)
        return self.down(hidden).sum(1)

accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Flatten(), Block())
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
own = accelerator.process_index == accelerator.num_processes - 1
def limit():
    if own:
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 20 * 2**20, resource.RLIM_INFINITY))
batch = torch.ones(16, 1024)
if sys.argv[1] == "python":
    table = [bytearray(2**20)]
    limit()
    table.append(bytearray(2**29) if own else b"")
if sys.argv[1] == "forward":
    limit()
loss = model(batch).square().mean()
accelerator.backward(loss)
if sys.argv[1] == "step":
    limit()
optimizer.step()
"""


STEP = "32.0 MiB  gradient of 1.up.weight  [8192, 1024] float32 cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "num_processes", "texts", "advice"),
    [
        (
            "forward",
            2,
            ["out of memory: 512.0 MiB more were wanted in 1, {script}:14", "hidden in forward ({script}:14)"],
            "a micro-batch of half the size, with twice as many gradient_accumulation_steps",
        ),
        pytest.param("step", 2, [STEP], "engine='fsdp2'", marks=pytest.mark.soak),
        pytest.param("step", 1, [STEP], "bitsandbytes.optim.AdamW8bit", marks=pytest.mark.slow),
        pytest.param(
            "python",
            1,
            ["out of memory in {script}:", "batch in <module> ({script}:"],
            "reading or building less at once in {script}:29: Python wanted the memory",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_error_names_the_largest_tensors_and_one_switch(
    command: Command, where: str, num_processes: int, texts: list[str], advice: str
) -> None:
    command.write("train.py", SCRIPT)
    script = command.directory / "train.py"
    result = command.launch(f"--num_processes={num_processes}", "--cpu", "--quiet", "train.py", where)
    assert result.code == 1
    for text in texts:
        assert text.format(script=script) in result.err
    report = result.err[result.err.index("echelon: ") :]
    assert "  do:    " in report
    assert advice.format(script=script) in report[report.index("  do:    ") :]
    assert "of this rank:" in result.err
