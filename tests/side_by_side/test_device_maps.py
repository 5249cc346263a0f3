"""Device maps and budgets of random models are those of accelerate."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.side_by_side.run import ROOT

PROGRAM = """
import logging, random, warnings
import torch
from torch import nn
from accelerate.utils import modeling as theirs
from echelon.utils import modeling as ours

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

class Block(nn.Module): pass
class Other(nn.Module): pass

def leaf(draw):
    kind = draw.randrange(5)
    sizes = draw.randint(1, 9), draw.randint(1, 9)
    if kind == 0: return nn.Linear(*sizes, bias=draw.random() < 0.5)
    if kind == 1: return nn.Embedding(*sizes)
    return (nn.LayerNorm(sizes[0]), nn.BatchNorm1d(sizes[0]), nn.ReLU())[kind - 2]

def tree(draw, depth):
    module = (Block if draw.random() < 0.3 else Other)()
    for number in range(draw.randint(1, 4)):
        deeper = depth and draw.random() < 0.6
        module.add_module(f"m{number}_{draw.randrange(1000)}", tree(draw, depth - 1) if deeper else leaf(draw))
    if draw.random() < 0.15: module.register_parameter("own", nn.Parameter(torch.zeros(draw.randint(1, 20))))
    if draw.random() < 0.15: module.register_buffer("kept", torch.zeros(draw.randint(1, 20)), draw.random() < 0.5)
    return module

def tie(draw, model):
    owners = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    for _ in range(draw.randint(0, 2) if len(owners) > 1 else 0):
        one, other = draw.sample(owners, 2)
        other.weight = one.weight

def answer(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error

equal = refused = 0
for seed in range(1000):
    draw = random.Random(seed)
    model = tree(draw, 3)
    if seed % 2: tie(draw, model)
    total = theirs.compute_module_sizes(model)[""]
    devices = [*draw.sample([0, 1, 2], draw.randint(0, 3)), *(["cpu"] if draw.random() < 0.8 else [])]
    memory = {device: int(total * draw.choice([0.05, 0.1, 0.3, 0.5, 1, 2])) for device in devices}
    unsplit, dtype = draw.choice([None, ["Block"], ["Block", "Other"]]), draw.choice([None, torch.float16])
    options = {name: draw.random() < 0.5 for name in ("clean_result", "fallback_allocation", "offload_buffers")}
    calls = [("infer_auto_device_map", options), ("get_balanced_memory", {"low_zero": draw.random() < 0.4})]
    for name, more in calls:
        if not memory: continue
        found = [
            answer(getattr(package, name), model, dict(memory), unsplit, dtype, **more) for package in (theirs, ours)
        ]
        if isinstance(found[0], (KeyError, IndexError)):  # a parameter tied to one of the model itself; no device 0
            refused += 1
            assert isinstance(found[1], dict), (seed, name, found)
        else:
            assert dict(found[0]) == dict(found[1]), (seed, name, found)
            equal += 1
print(equal > 1500, refused < 150)
"""


def test_device_maps_are_those_of_accelerate(peers: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(
        [str(peers), "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert (ended.stdout.split(), ended.returncode) == (["True", "True"], 0), ended.stderr
