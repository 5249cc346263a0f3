"""accelerate resumes in the second epoch with the order of the first: ``load_state`` restores the sampler's epoch, not the loader's.

resume_in_epoch_2.py [--save FOLDER --after UPDATES] [--resume FOLDER --after UPDATES]; one update is one batch on one process.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--save")
parser.add_argument("--resume")
parser.add_argument("--after", type=int, default=0)
options = parser.parse_args()
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 6), torch.randn(16, 1))
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3))
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
update = 0
if options.resume:
    accelerator.load_state(options.resume)
    update = options.after
for _ in range(update // len(loader), 3):
    skipped = update % len(loader)
    for x, y in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        update += 1
        if options.save and update == options.after:
            accelerator.save_state(options.save)
