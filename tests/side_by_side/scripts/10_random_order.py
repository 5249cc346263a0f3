"""Ranks with different random states read shards of the same order of samples."""

import random

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, RandomSampler

accelerator = Accelerator()
set_seed(100, device_specific=True)
show("different on each process", [torch.rand(2).tolist(), random.random(), float(np.random.rand())])
set_seed(100, deterministic=True)
show("deterministic", torch.are_deterministic_algorithms_enabled())
torch.use_deterministic_algorithms(False)

torch.manual_seed(accelerator.process_index)
loader = accelerator.prepare(DataLoader(list(range(12)), batch_size=3, shuffle=True))
for epoch in range(2):
    mine = torch.cat(list(loader))
    show("how many", len(mine))
    show("every sample", sorted(accelerator.gather(mine).tolist()))

generator = torch.Generator().manual_seed(accelerator.process_index)
sampler = RandomSampler(range(12), generator=generator)
loader = accelerator.prepare(DataLoader(list(range(12)), batch_size=3, sampler=sampler))
for epoch in range(2):
    for batch in loader:
        show("own generator", batch)

set_seed(3)
loader = accelerator.prepare(DataLoader(list(range(12)), batch_size=3, shuffle=True))
for epoch in range(2):
    for batch in loader:
        show("one seed", batch)
