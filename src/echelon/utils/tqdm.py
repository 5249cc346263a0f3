"""Re-exports the names of ``accelerate.utils.tqdm``."""

from echelon.accelerator.progress_bar import tqdm as tqdm
