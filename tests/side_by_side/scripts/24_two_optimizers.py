"""A generator and a discriminator, each with an optimizer of its own, which step in turn."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset

set_seed(24)
accelerator = Accelerator()
real_samples = 0.5 * torch.randn(64, 2) + torch.tensor([2.0, -1.0])
noise_samples = torch.randn(64, 4)  # drawn once, so that each sample has its noise on any number of processes
generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 2))
discriminator = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
loader = DataLoader(TensorDataset(real_samples, noise_samples), batch_size=4)
generator, discriminator, generator_optimizer, discriminator_optimizer, loader = accelerator.prepare(
    generator, discriminator, generator_optimizer, discriminator_optimizer, loader
)
criterion = torch.nn.BCEWithLogitsLoss()

for epoch in range(2):
    for real, noise in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(noise)
        discriminator_optimizer.zero_grad()
        scores = discriminator(torch.cat([real, fake.detach()]))
        discriminator_loss = criterion(scores, torch.cat([ones, zeros]))
        accelerator.backward(discriminator_loss)
        discriminator_optimizer.step()

        generator_optimizer.zero_grad()
        generator_loss = criterion(discriminator(fake), ones)
        accelerator.backward(generator_loss)
        generator_optimizer.step()
        show("discriminator loss", discriminator_loss)
        show("generator loss", generator_loss)
for name, value in generator.named_parameters():
    show(name.removeprefix("module."), value)
