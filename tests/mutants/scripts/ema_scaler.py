"""A DistributedDataParallel loop with a loss scaler, one batch whose gradients overflow, and an average of the weights."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.mutants.probe import probe

EPOCHS, BATCH_SIZE, MAX_NORM, DECAY = 3, 4, 1.0, 0.8
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


def make_data(count=32):
    random = torch.Generator().manual_seed(7)
    x = torch.randn(count, 8, generator=random)
    y = x @ torch.randn(8, 4, generator=random)
    x[30] = float("inf")  # a damaged sample: every epoch has one update that the scaler must skip
    return TensorDataset(x, y)


def main():
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK, shuffle=True, seed=4)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
    torch.manual_seed(0)
    student = Student()
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = DistributedDataParallel(student) if WORLD_SIZE > 1 else student
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def state():
        average = {f"teacher.{name}": value for name, value in teacher.state_dict().items()}
        return {**student.state_dict(), **average, "scale": scaler.get_scale()}

    probe(state)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            with torch.no_grad():
                target = 0.9 * y + 0.1 * teacher(x)
            scaler.scale(F.mse_loss(output, target)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                for average, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                    average.lerp_(weight, 1 - DECAY)
            probe(state)


if __name__ == "__main__":
    main()
