"""`gather_for_metrics` gives every sample once where the length is the sampler's: an error over the dataset's is no excuse."""

from accelerate import Accelerator
from show import show
from torch.utils.data import DataLoader


class Squares:
    """Has no length: its own would be infinite."""

    def __getitem__(self, index):
        return index * index


accelerator = Accelerator()
loader = accelerator.prepare(DataLoader(Squares(), batch_size=2, sampler=range(5)))
seen = [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]
show("samples", seen)

# Five of eight: the length of the dataset divides evenly, that of the sampler does not.
loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2, sampler=range(5)))
seen = [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]
show("samples of a part", seen)
