"""``save_state()`` under ``if accelerator.is_main_process``, as examples of diffusers do it."""

from __future__ import annotations

import json
import logging
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.base.errors import DesyncError
from echelon.base.warnings import EchelonWarning
from echelon.distributed import monitored_barrier
from echelon.distributed.setup import cleanup
from echelon.utils import ProjectConfiguration
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings
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
    with all_warnings() as caught:
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
    cleanup()
    return [p.detach() for p in bare.parameters()], [str(w.message) for w in caught if w.category is EchelonWarning]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["echelon", "accelerate"])
def test_the_main_process_saves_alone_and_all_ranks_resume(kind: Any, tmp_path: Path) -> None:
    """Bit-equal weights, because nothing but the order of samples is random here."""
    folder = str(tmp_path / "s")
    (first, warned), (second, silent) = run_on_ranks(
        _train, folder, kind, "ddp", resumes=False, world_size=2, init_group=False
    )
    assert [text.split(",")[0] for text in warned] == [
        "save_state() runs on the main process only"
    ]  # once for two saves
    assert silent == []
    for weights, _ in run_on_ranks(_train, folder, kind, "ddp", resumes=True, world_size=2, init_group=False):
        for mine, one, other in zip(weights, first, second):
            assert torch.equal(mine, one)
            assert torch.equal(mine, other)


def test_sharded_engines_save_on_every_rank(tmp_path: Path) -> None:
    """Examples write ``if accelerator.is_main_process or accelerator.distributed_type == DistributedType.DEEPSPEED``."""
    folder = str(tmp_path / "s")
    first = run_on_ranks(_train, folder, "echelon", "zero1", resumes=False, world_size=2, init_group=False)
    assert [warned for _, warned in first] == [[], []]
    for (resumed, _), (weights, _) in zip(
        run_on_ranks(_train, folder, "echelon", "zero1", resumes=True, world_size=2, init_group=False), first
    ):
        assert all(map(torch.equal, resumed, weights))


def _prepared(engine: str) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, seed=0, engine=engine)
    bare = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    return accelerator, model, bare


def _saves_before_a_barrier(folder: str) -> tuple[list[str], float]:
    """Save on the main process only, while the others wait at a barrier, and let all ranks save afterwards."""
    accelerator, model, _ = _prepared("ddp")
    with all_warnings() as caught:
        if accelerator.is_main_process:
            accelerator.save_state(folder + "/alone")
            accelerator.save_model(model, folder + "/model")
        accelerator.wait_for_everyone()
        accelerator.save_state(folder + "/together")
    total = float(accelerator.gather(torch.ones(1)).sum())
    cleanup()
    return [str(one.message) for one in caught], total


def test_ranks_that_wait_at_a_barrier_go_on_after_the_main_process_has_saved(tmp_path: Path) -> None:
    (said, first), (silent, second) = run_on_ranks(
        _saves_before_a_barrier, str(tmp_path), world_size=2, init_group=False
    )
    assert len(said) == 1
    assert said[0].startswith("save_state() runs on the main process only")
    assert (silent, first, second) == ([], 2.0, 2.0)
    alone, together = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("alone", "together"))
    assert alone.keys() == together.keys()
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"weight", "bias"}


def _saves_after_the_others_have_ended(folder: str) -> list[str]:
    accelerator, _, _ = _prepared("ddp")
    with all_warnings() as caught:
        if accelerator.is_main_process:
            accelerator.save_state(folder)
        cleanup()
    return [str(one.message)[:43] for one in caught if one.category is EchelonWarning]


def test_the_main_process_saves_after_the_others_have_ended(tmp_path: Path) -> None:
    results = run_on_ranks(_saves_after_the_others_have_ended, str(tmp_path), world_size=2, init_group=False)
    assert results == [["save_state() runs on the main process only,"[:43]], []]
    assert (tmp_path / "manifest.json").exists()


def _some_save(folder: str, engine: str, num_saving: int) -> str:
    accelerator, _, _ = _prepared(engine)
    text = ""
    if accelerator.process_index < num_saving:
        with pytest.raises(DesyncError) as error:
            accelerator.save_state(folder)
        text = str(error.value)
    accelerator.gather(torch.ones(1))
    cleanup()
    return text


@pytest.mark.parametrize(("engine", "num_saving"), [("ddp", 2), ("fsdp2", 1)])
def test_a_save_on_some_ranks_is_an_error_that_names_the_others(engine: str, num_saving: int, tmp_path: Path) -> None:
    *saving, _ = run_on_ranks(
        _some_save, str(tmp_path / "s"), engine, num_saving, world_size=num_saving + 1, init_group=False
    )
    for text in saving:
        assert "save_state() must be called on every rank, but some ranks did not call it" in text
        assert f"rank {num_saving}: in another collective at " in text
    assert not (tmp_path / "s").exists()


def _waits_for_a_late_rank(folder: str) -> list[str]:
    accelerator, _, _ = _prepared("ddp")
    if not accelerator.is_main_process:
        time.sleep(1.5)  # more than the time after which the others are asked where they are
    with all_warnings() as caught:
        accelerator.save_state(folder)
    cleanup()
    return [str(one.message) for one in caught]


def test_the_main_process_waits_for_a_rank_that_is_late(tmp_path: Path) -> None:
    assert run_on_ranks(_waits_for_a_late_rank, str(tmp_path), world_size=2, init_group=False) == [[], []]


def _saves_while_the_others_wait_for_it(folder: str) -> tuple[list[str], str]:
    """Save in a block that the other ranks enter later, and call there what needs every rank."""
    accelerator, model, _ = _prepared("ddp")
    text = ""
    with all_warnings() as caught:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                accelerator.save_state(folder + "/state")
                accelerator.save_model(model, folder + "/model")
                with pytest.raises(DesyncError) as error:
                    accelerator.wait_for_everyone()
                text = str(error.value)
    accelerator.wait_for_everyone()
    cleanup()
    return [str(one.message).split(",")[0] for one in caught], text


def test_the_main_process_saves_in_a_block_that_the_others_wait_for(tmp_path: Path) -> None:
    (warned, text), others = run_on_ranks(
        _saves_while_the_others_wait_for_it, str(tmp_path), world_size=2, init_group=False
    )
    assert warned == ["save_state() runs on the main process only"]
    assert "the other ranks wait for this one to leave the block of main_first() or main_process_first()" in text
    assert others == ([], "")
    assert (tmp_path / "state" / "manifest.json").exists()
    assert (tmp_path / "model" / "model.safetensors").exists()


def _saves_alone_then_elsewhere_together(folder: str) -> list[str]:
    accelerator, _, _ = _prepared("ddp")
    with all_warnings() as caught:
        if accelerator.is_main_process:
            accelerator.save_state(folder + "/first")
        accelerator.save_state(folder + "/second")
    accelerator.end_training()
    cleanup()
    return [str(one.message).split(",")[0] for one in caught]


def test_a_save_on_the_main_process_is_told_from_the_next_save_on_all_ranks(tmp_path: Path) -> None:
    warned = run_on_ranks(_saves_alone_then_elsewhere_together, str(tmp_path), world_size=2, init_group=False)
    assert warned == [["save_state() runs on the main process only"], []]
    sizes = [
        json.loads((tmp_path / name / "manifest.json").read_text())["manifest"]["world_size"]
        for name in ("first", "second")
    ]
    assert sizes == [1, 2]


def _saves_alone_and_together(folder: str) -> list[str]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, seed=0, project_config=project)
    bare = nn.Linear(3, 1)
    accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        if accelerator.is_main_process:
            accelerator.save_state()
        accelerator.wait_for_everyone()
    saved = [accelerator.save_state().name for _ in range(2)]
    cleanup()
    return saved


def test_checkpoints_are_numbered_alike_after_the_main_process_has_saved_alone(tmp_path: Path) -> None:
    results = run_on_ranks(_saves_alone_and_together, str(tmp_path), world_size=2, init_group=False)
    assert results == [["checkpoint_1", "checkpoint_2"]] * 2


class _SendsWhenItHears(logging.Handler):
    """Keeps the messages, and sends what rank one waits for after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        dist.send(torch.ones(1), dst=1)


def _saves_before_the_others_receive(folder: str) -> list[str]:
    accelerator, _, _ = _prepared("ddp")
    handler = _SendsWhenItHears()
    logger = logging.getLogger("echelon.distributed.monitored_barrier")
    if accelerator.is_main_process:
        logger.addHandler(handler)
    else:
        dist.recv(torch.zeros(1), src=0)
    with patch.object(monitored_barrier, "_REMINDER", timedelta(seconds=1.5)):
        accelerator.save_state(folder)
    logger.removeHandler(handler)
    cleanup()
    return handler.texts


def test_a_main_process_that_others_wait_for_unseen_says_what_to_do(tmp_path: Path) -> None:
    (text,), others = run_on_ranks(_saves_before_the_others_receive, str(tmp_path), world_size=2, init_group=False)
    assert "dist.recv(torch.zeros(1), src=0)" in text
    assert "If they wait for this rank in another way (recv(), a file), call it on every rank" in text
    assert others == []


def _saves_before_a_block_of_the_main_process(folder: str) -> tuple[int, str]:
    """Save on the main process only, while the others wait at the next block of main_process_first()."""
    accelerator, model, _ = _prepared("ddp")
    text = ""
    with all_warnings() as caught:
        for i in range(2):
            if accelerator.is_main_process:
                accelerator.save_state(f"{folder}/alone{i}")
                accelerator.save_model(model, f"{folder}/model{i}")
            with accelerator.main_process_first():
                pass
            accelerator.save_state(f"{folder}/together{i}")  # the finished block counts no more
        if accelerator.is_main_process:
            with pytest.raises(DesyncError) as error:
                accelerator.wait_for_everyone()
            text = str(error.value)
        with accelerator.local_main_process_first():
            pass
    cleanup()
    return len(caught), text


@pytest.mark.slow
def test_the_main_process_saves_before_a_block_that_the_others_wait_to_enter(tmp_path: Path) -> None:
    (num_warnings, text), (others, _) = run_on_ranks(
        _saves_before_a_block_of_the_main_process, str(tmp_path), world_size=2, init_group=False
    )
    assert (num_warnings, others) == (1, 0)
    assert "rank 1: waits in main_first() for this rank at " in text
    manifests = [tmp_path / f"{name}{i}" / "manifest.json" for name in ("alone", "together") for i in range(2)]
    assert all(path.exists() for path in manifests)
