"""``save_state()`` under ``if accelerator.is_main_process``, as examples of diffusers do it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.accelerator.checkpoint.main_process_line import is_on_main_process_only
from echelon.base.warnings import EchelonWarning, UserLine
from echelon.utils import ProjectConfiguration
from tests.harness import run_on_ranks
from tests.reference import gaussian, mean_square, tanh_net

_SAVED = 3


def _train(folder: str, kind: Any, engine: str, *, resumes: bool) -> tuple[list[torch.Tensor], list[str]]:
    accelerator = Accelerator(
        cpu=True, seed=0, engine=engine, project_config=ProjectConfiguration(checkpoint_format=kind)
    )
    bare: Any = tanh_net(6, 5, 1)
    if resumes:
        with torch.no_grad():
            next(bare.parameters()).zero_()
    optimizer: Any = torch.optim.AdamW(bare.parameters(), lr=0.1)
    loader: Any = DataLoader(gaussian(32, 6), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if resumes:
            accelerator.load_state(folder)
        for step, x in enumerate(accelerator.skip_first_batches(loader, _SAVED) if resumes else loader, 1):
            accelerator.backward(mean_square(model(x)))
            optimizer.step()
            optimizer.zero_grad()
            if not resumes and step in (2, _SAVED) and (accelerator.is_main_process or engine == "zero1"):
                if step == _SAVED:
                    accelerator.save_state(folder)
                else:
                    accelerator.save_state(folder + "_first")
        accelerator.end_training()
    return [p.detach() for p in bare.parameters()], [str(w.message) for w in caught if w.category is EchelonWarning]


@pytest.mark.parametrize("kind", ["echelon", "accelerate"])
def test_the_main_process_saves_alone_and_all_ranks_resume(kind: Any, tmp_path: Path) -> None:
    """Bit-equal weights, because nothing but the order of samples is random here."""
    folder = str(tmp_path / "s")
    (first, warned), (second, silent) = run_on_ranks(_train, folder, kind, "ddp", resumes=False, world_size=2)
    assert [text.split(",")[0] for text in warned] == ["save_state() runs on the main process only"] * 2  # two lines
    assert silent == []
    for weights, _ in run_on_ranks(_train, folder, kind, "ddp", resumes=True, world_size=2):
        for mine, one, other in zip(weights, first, second):
            assert torch.equal(mine, one)
            assert torch.equal(mine, other)


def test_sharded_engines_save_on_every_rank(tmp_path: Path) -> None:
    """Examples write ``if accelerator.is_main_process or accelerator.distributed_type == DistributedType.DEEPSPEED``."""
    folder = str(tmp_path / "s")
    first = run_on_ranks(_train, folder, "echelon", "zero1", resumes=False, world_size=2)
    assert [warned for _, warned in first] == [[], []]
    for (resumed, _), (weights, _) in zip(
        run_on_ranks(_train, folder, "echelon", "zero1", resumes=True, world_size=2), first
    ):
        assert all(map(torch.equal, resumed, weights))


_PROGRAM = """
if accelerator.is_main_process:
    first
if step % 2 and (accelerator.is_main_process or accelerator.distributed_type == "DEEPSPEED"):
    if step > 1:
        second
else:
    third
if not accelerator.is_main_process:
    fourth
fifth
"""


def test_the_condition_is_read_from_the_source(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(_PROGRAM)
    lines = {text.strip(): i for i, text in enumerate(_PROGRAM.splitlines(), 1)}
    names = ("first", "second", "third", "fourth", "fifth")
    found = [name for name in names if is_on_main_process_only(UserLine((str(file), lines[name])))]
    assert found == ["first", "second"]
    assert not is_on_main_process_only(UserLine(("<stdin>", 1)))
