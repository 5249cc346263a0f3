"""Small images: convolutions, augmentation inside the model's training step, label smoothing, a cosine schedule for each epoch."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from show import show
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Bars at random places; each second epoch sees them mirrored, as every image decides by its number and the epoch."""

    def __init__(self, count):
        random = torch.Generator().manual_seed(2)
        self.labels = torch.randint(2, (count,), generator=random)
        self.images = 0.1 * torch.randn(count, 1, 8, 8, generator=random)
        for image, label, place in zip(self.images, self.labels, torch.randint(8, (count,), generator=random)):
            image[0, place, :] += float(label)
            image[0, :, place] += 1.0 - float(label)
        self.epoch = 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(1000 * self.epoch + index)
        image = self.images[index]
        if torch.rand(1, generator=random) < 0.5:
            image = image.flip(-1)
        shift = int(torch.randint(-1, 2, (1,), generator=random))
        return {"image": image.roll(shift, dims=-1), "label": self.labels[index]}


set_seed(22)
accelerator = Accelerator()
data = Shapes(96)
loader = DataLoader(data, batch_size=6)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, padding=1),
    torch.nn.GroupNorm(2, 8),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(8, 8, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(8, 2),
)
for parameter in model[0].parameters():
    parameter.requires_grad = False  # a frozen first layer, as in fine-tuning
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

for epoch in range(2):
    data.epoch = epoch
    model.train()
    total = torch.zeros(1)
    for batch in loader:
        loss = criterion(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        total += loss.detach()
    scheduler.step()  # not prepared: once for each epoch
    show("epoch loss", accelerator.reduce(total, reduction="mean").item() / len(loader))
    show("rate", scheduler.get_last_lr())
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    show("names", sorted(state))
    show("weight", state["8.weight"])
    show("frozen", float(state["0.weight"].abs().sum()))
