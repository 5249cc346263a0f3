"""`gather_for_metrics` returns every sample of a sampler once, even if the length of the dataset raises an error."""

from accelerate import Accelerator
from show import show
from torch.utils.data import DataLoader


class Squares:
    """A dataset without a length, because it would be infinite."""

    def __getitem__(self, index):
        return index * index


accelerator = Accelerator()
loader = accelerator.prepare(DataLoader(Squares(), batch_size=2, sampler=range(5)))
seen = [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]
show("samples", seen)

# Five of eight: the length of the dataset is a multiple of the batch, that of the sampler is not.
loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2, sampler=range(5)))
seen = [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]
show("samples of a part", seen)
