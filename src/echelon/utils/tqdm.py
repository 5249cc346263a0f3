"""Provides the names in ``accelerate.utils.tqdm``, implemented by echelon."""

from echelon.accelerator.progress_bar import tqdm as tqdm
