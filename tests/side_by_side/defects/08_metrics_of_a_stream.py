"""`gather_for_metrics` over a stream of 10 samples returns 10."""

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from show import show
from torch.utils.data import DataLoader, IterableDataset


class Ten(IterableDataset):
    def __iter__(self):
        return iter(range(10))


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
loader = accelerator.prepare(DataLoader(Ten(), batch_size=4))
seen = [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]
show("samples", len(seen))
show("seen", seen)
