"""A `break` ends the loop over a prepared loader, also in GradientState."""

from accelerate import Accelerator
from show import show
from torch.utils.data import DataLoader

accelerator = Accelerator()
loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
for batch in loader:
    break
show("in a loader after break", accelerator.gradient_state.in_dataloader)
