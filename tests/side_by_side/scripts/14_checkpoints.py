"""save_state and load_state: the files, and uninterrupted training after loading."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset

folder = Path.cwd()
project = ProjectConfiguration(
    project_dir=str(folder),
    logging_dir=str(folder / "logs"),
    automatic_checkpoint_naming=True,
    total_limit=2,
    iteration=3,
    save_on_each_node=False,
)
accelerator = Accelerator(project_config=project)


def epoch():
    for (inputs,) in loader:
        accelerator.backward(model(inputs).pow(2).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.detach().clone()


def files(path):
    accelerator.wait_for_everyone()
    return sorted(str(file.relative_to(path)) for file in Path(path).rglob("*") if file.is_file())


set_seed(0)
x = torch.randn(16, 3)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
loader = DataLoader(TensorDataset(x), batch_size=4)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

before = epoch()
for _ in range(3):
    accelerator.save_state()
accelerator.wait_for_everyone()
show("iteration", accelerator.project_configuration.iteration)
show("kept", sorted(os.listdir(folder / "checkpoints")))
show("files", files(folder / "checkpoints" / "checkpoint_5"))
accelerator.project_configuration.automatic_checkpoint_naming = False
accelerator.save_state(output_dir="by_hand", safe_serialization=False)
show("files by hand", files("by_hand"))
noise, after, rate = torch.rand(1).item(), epoch(), scheduler.get_last_lr()
show("weight", after)
show("lr", rate)

accelerator.load_state(input_dir="by_hand")
show("weight is back", torch.equal(accelerator.unwrap_model(model).weight, before))
show("random state is back", torch.rand(1).item() == noise)
show("the same again", torch.equal(epoch(), after))
show("lr again", scheduler.get_last_lr())
accelerator.project_configuration.automatic_checkpoint_naming = True
accelerator.load_state()
show("newest", torch.equal(accelerator.unwrap_model(model).weight, before))

# A shuffled loader in the middle of its epochs.
accelerator.free_memory()
accelerator.project_configuration.automatic_checkpoint_naming = False
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
epoch()
accelerator.save_state("shuffled")
show("files shuffled", files("shuffled"))
after = epoch()
accelerator.load_state("shuffled")
show("shuffled again", torch.equal(epoch(), after))
