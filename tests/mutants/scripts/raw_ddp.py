"""A DistributedDataParallel loop: batch norm over all ranks, dropout, accumulation, clipping, a warm-up."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.mutants.probe import probe

EPOCHS, BATCH_SIZE, ACCUMULATION, MAX_NORM = 3, 4, 2, 0.5
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class SumOverRanks(torch.autograd.Function):
    """The sum over all ranks; its gradient is the sum over all ranks, too."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class GlobalBatchNorm(nn.BatchNorm1d):
    """Batch norm with the statistics of all ranks (SyncBatchNorm needs a GPU)."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        sums = torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))])
        if WORLD_SIZE > 1:
            sums = SumOverRanks.apply(sums)
        count = sums[-1]
        mean, square = (sums[:-1] / count).chunk(2)
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = GlobalBatchNorm(16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.dropout(F.relu(self.norm(self.first(x)))))


def make_data(count=40):
    random = torch.Generator().manual_seed(7)
    x = torch.randn(count, 8, generator=random)
    return TensorDataset(x, (x @ torch.randn(8, 4, generator=random)).argmax(dim=1))


def main():
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net) if WORLD_SIZE > 1 else net
    torch.manual_seed(100 + RANK)  # each rank draws its own dropout masks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 4) * 0.97**update)

    def state():
        return {**net.state_dict(), "lr": schedule.get_last_lr()[0]}

    probe(state)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            first = i - i % ACCUMULATION
            window = min(ACCUMULATION, len(loader) - first)
            is_last = i == first + window - 1
            with nullcontext() if is_last or WORLD_SIZE == 1 else model.no_sync():
                loss = F.cross_entropy(model(x), y)
                (loss / window).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                probe(state)


if __name__ == "__main__":
    main()
