"""The real webdataset and datasets libraries, if installed (make peers): each sample exactly once."""

from __future__ import annotations

import importlib
import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.base.warnings import EchelonWarning
from echelon.distributed import shard
from tests.harness import run_on_ranks

NUM = 48


def _webdataset(folder: str) -> Any:
    webdataset = importlib.import_module("webdataset")
    urls = sorted(map(str, Path(folder).glob("*.tar")))
    stream = webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node, shardshuffle=False)
    return stream.map(lambda sample: torch.tensor(int(sample["x.txt"])))


def _table(_: str) -> Any:
    datasets = importlib.import_module("datasets")
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    whole = datasets.Dataset.from_dict({"x": list(range(NUM))}).with_format("torch")
    return split(whole, dist.get_rank(), dist.get_world_size())


def _stream(_: str) -> Any:
    datasets = importlib.import_module("datasets")
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    whole = datasets.Dataset.from_dict({"x": list(range(NUM))}).to_iterable_dataset(num_shards=12).with_format("torch")
    return split(whole, dist.get_rank(), dist.get_world_size())


MADE = {"webdataset": _webdataset, "datasets, a table": _table, "datasets, a stream": _stream}


def _read(kind: str, folder: str) -> list[list[int]]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", EchelonWarning)
        for prepare in (Accelerator(cpu=True).prepare, shard):
            for num_workers in (0, 2):
                loader = prepare(DataLoader(MADE[kind](folder), batch_size=2, num_workers=num_workers))
                batches = [batch["x"] if isinstance(batch, dict) else batch for batch in loader]
                found.append([int(value) for batch in batches for value in batch])
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", MADE)
def test_the_sharding_of_a_library_is_kept(kind: str, world_size: int, tmp_path: Path) -> None:
    pytest.importorskip(kind.partition(",")[0], reason="not installed: make peers")
    for number in range(12):
        with tarfile.open(tmp_path / f"{number:02}.tar", "w") as archive:
            for sample in range(4 * number, 4 * number + 4):
                text = str(sample).encode()
                member = tarfile.TarInfo(f"{sample:04}.x.txt")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
    ranks = run_on_ranks(_read, kind, str(tmp_path), world_size=world_size, timeout=200)
    for case in zip(*ranks):
        assert sorted(value for values in case for value in values) == list(range(NUM))
