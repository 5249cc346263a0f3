"""A DistributedDataParallel loop that saves everything and resumes in the middle of an epoch.

resume_loop.py [--save FILE --after UPDATES] [--resume FILE]
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.mutants.probe import probe

EPOCHS, BATCH_SIZE = 4, 4
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.center.lerp_(torch.ones(8), 0.1)
        return self.head(self.dropout(torch.tanh(self.first(x - 0.1 * self.center))))


def make_data(count=32):
    random = torch.Generator().manual_seed(7)
    x = torch.randn(count, 8, generator=random)
    return TensorDataset(x, (x @ torch.randn(8, 4, generator=random)).argmax(dim=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save")
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--resume")
    options = parser.parse_args()
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net) if WORLD_SIZE > 1 else net
    torch.manual_seed(100 + RANK)  # each rank draws its own dropout masks
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    update = 0
    if options.resume:
        saved = torch.load(options.resume, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        torch.set_rng_state(saved["rng"][RANK])
        update = saved["update"]

    def state():
        return {**net.state_dict(), "lr": schedule.get_last_lr()[0]}

    probe(state)
    per_epoch = len(loader)
    for epoch in range(update // per_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        done = update % per_epoch
        for i, (x, y) in enumerate(loader):
            if i < done:
                continue
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            update += 1
            probe(state)
            if options.save and update == options.after:
                rng = [torch.get_rng_state() for _ in range(WORLD_SIZE)]
                if WORLD_SIZE > 1:
                    dist.all_gather(rng, torch.get_rng_state())
                if RANK == 0:
                    saved = {
                        "model": net.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(),
                        "rng": rng,
                        "update": update,
                    }
                    torch.save(saved, options.save)
                if WORLD_SIZE > 1:
                    dist.barrier()


if __name__ == "__main__":
    main()
