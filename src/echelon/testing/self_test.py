"""The program that ``echelon test`` runs on every rank. It compares a small training run with a plain PyTorch loop.

To run it manually and write the results to ``FOLDER/findings.jsonl``: ``echelon launch --cpu --num_processes 2 --max_restarts
1 -m echelon.testing.self_test layout FOLDER``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon.accelerator.accelerator import Accelerator
from echelon.accelerator.plugins.kwargs_handlers import DistributedDataParallelKwargs
from echelon.accelerator.plugins.project_configuration import ProjectConfiguration
from echelon.base.device import nccl_version
from echelon.base.errors import LaunchError
from echelon.base.messages.translation import gettext as _
from echelon.base.rank import known_rank
from echelon.compat.machine import convert_bytes
from echelon.distributed.collectives import broadcast_object_list, gather_object
from echelon.testing.bandwidth import Measured, measure
from echelon.testing.evidence import OWNED_FILE, WEIGHTS_FILE, EvidenceWriter
from echelon.world.launch_variables import attempt_number

SEED = 11
EPOCHS = 2
LEARNING_RATE = 0.05
MOMENTUM = 0.9
MAX_MICRO_BATCH_SIZE = 5  # so that an update has several micro-steps of unequal size

SAVE_EVERY = 4  # updates
KILL_AFTER = 10  # in the middle of the second epoch; two updates since the last checkpoint are lost

QUICK_SIZES = (1 << 10, 1 << 20)
SIZES = (*QUICK_SIZES, 1 << 24)
ACCELERATOR_SIZES = (*SIZES, 1 << 28)


# ---- the problem -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A regression problem on seeded random numbers, with enough samples for every rank in each update."""

    world_size: int
    dtype: torch.dtype

    @property
    def batch_size(self) -> int:
        """Number of samples per update, across all ranks."""
        return max(24, 3 * self.world_size // 2)

    @property
    def num_samples(self) -> int:
        """Number of samples per epoch. The last batch is incomplete."""
        return 5 * self.batch_size + self.batch_size // 2 - 2

    @property
    def num_updates(self) -> int:
        """Number of updates in the whole run."""
        return EPOCHS * math.ceil(self.num_samples / self.batch_size)

    @property
    def tolerance(self) -> float:
        """Largest relative difference between weights that the order of summation can explain.

        In float64, this is what docs/parity.md guarantees; otherwise, it is one rounding error per sample and update.
        """
        return (
            1e-12 if self.dtype is torch.float64 else self.num_updates * self.batch_size * torch.finfo(self.dtype).eps
        )


class ToyDataset(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Yields each sample with its index."""

    def __init__(self, problem: Problem) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.x = torch.randn(problem.num_samples, 16, generator=generator, dtype=torch.float64).to(problem.dtype)
        self.y = self.x[:, :4].sin() + self.x[:, 4:8] * self.x[:, 8:12]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return i, self.x[i], self.y[i]


def build_model(problem: Problem, *, dropout: float = 0.0) -> nn.Module:
    """Return the model, which has the same weights on every rank."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Dropout(dropout), nn.Linear(32, 4, bias=False)
    ).to(problem.dtype)


def plain(problem: Problem, device: torch.device) -> dict[str, torch.Tensor]:
    """Train the reference model on full batches in this process using plain PyTorch, and return its weights."""
    samples, model = ToyDataset(problem), build_model(problem).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(SEED + epoch))
        for batch in torch.split(order, problem.batch_size):
            loss = F.mse_loss(model(samples.x[batch].to(device)), samples.y[batch].to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


@dataclass(slots=True, kw_only=True)
class Trained:
    """Results of a run that uses echelon."""

    weights: dict[str, torch.Tensor] | None = None
    """Final weights; available only on rank zero if parameters are sharded."""
    samples: list[list[int]] = field(default_factory=list)
    """Indices of the samples used on all ranks, by epoch."""
    resumed_at: int = 0
    """The update after which the run resumed."""


def train(
    accelerator: Accelerator,
    problem: Problem,
    *,
    dropout: float = 0.0,
    resumes: bool = False,
    after_update: Callable[[int], None] = lambda update: None,
) -> Trained:
    """Train in the same way as a user's script. Collective."""
    model = build_model(problem, dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    loader: Any = DataLoader(ToyDataset(problem), batch_size=problem.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    trained = Trained()
    if resumes and accelerator.resume():
        trained.resumed_at = accelerator.progress.step
    for _epoch in accelerator.epochs(EPOCHS):
        seen: list[int] = []
        for numbers, x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            seen += accelerator.trim_for_metrics(numbers).tolist()  # drops padding samples
            if accelerator.sync_gradients:
                after_update(accelerator.progress.step)
        trained.samples.append(gather_object(seen))
    found = accelerator.get_state_dict(model)
    trained.weights = None if found is None else {name: value.cpu() for name, value in found.items()}
    return trained


# ---- the checks ------------------------------------------------------------------------------------------------------


def check_world(accelerator: Accelerator, writer: EvidenceWriter) -> None:
    """Check that all ranks can communicate and that each has its own device. Collective."""
    writer.begin("world")
    world = accelerator.world
    here = [
        {
            "rank": world.rank,
            "host": socket.gethostname(),
            "device": str(world.device),
            "name": _device_name(world.device),
        }
    ]
    ranks: list[dict[str, Any]] = gather_object(here)
    contribution = torch.tensor([world.rank + 1.0], device=world.device)
    total = int(accelerator.reduce(contribution, "sum").item())
    hosts = sorted({rank["host"] for rank in ranks})
    places = {(rank["host"], rank["device"]) for rank in ranks}
    n = world.world_size
    problems = []
    if [rank["rank"] for rank in ranks] != list(range(n)):
        problems.append(
            f"expected answers from ranks 0 to {n - 1}, but got answers from {[rank['rank'] for rank in ranks]}"
        )
    if total != n * (n + 1) // 2:
        problems.append(f"expected the sum of rank + 1 to be {n * (n + 1) // 2}, but got {total}")
    if world.device.type != "cpu" and len(places) < n:
        problems.append(f"{n} ranks share {len(places)} devices")
    names = sorted({rank["name"] for rank in ranks})
    writer.found(
        "world",
        not problems,
        "; ".join(problems)
        or _(
            "{n} rank{s} on {num_hosts} machine{more} ({names}), {backend}",
            n=n,
            s="" if n == 1 else "s",
            num_hosts=len(hosts),
            more="" if len(hosts) == 1 else "s",
            names=", ".join(names),
            backend=world.backend,
        ),
        do=_("check each machine's devices and network with echelon env"),
        figures={
            "world_size": n,
            "num_machines": len(hosts),
            "backend": world.backend,
            "engine": accelerator.capabilities.name,
            "torch": torch.__version__,
            "nccl": nccl_version(),
            "threads": torch.get_num_threads(),
            # A number per machine instead of its name.
            "ranks": [{**rank, "host": hosts.index(rank["host"])} for rank in ranks],
        },
    )


def check_exact(accelerator: Accelerator, writer: EvidenceWriter) -> str:
    """Check that the weights match plain PyTorch and that each sample is used once. Return the weights' digest. Collective."""
    writer.begin("exact")
    problem = _problem(accelerator)
    trained = train(accelerator, problem)
    reference = plain(problem, accelerator.device)
    digest: str
    error, digest = broadcast_object_list([_relative_error(trained.weights, reference), _digest(trained.weights)])
    dtype = str(problem.dtype).removeprefix("torch.")
    writer.found(
        "exact",
        error <= problem.tolerance,
        _(
            "{num_updates} updates on {n} rank{s} against plain PyTorch on one: relative error {error:.1e} ({dtype}, "
            "tolerance {tolerance:.0e})",
            num_updates=problem.num_updates,
            n=accelerator.num_processes,
            s="" if accelerator.num_processes == 1 else "s",
            error=error,
            dtype=dtype,
            tolerance=problem.tolerance,
        ),
        do=_("report this problem and attach the evidence file: the update depends on how the batch was split"),
        figures={
            "error": error,
            "tolerance": problem.tolerance,
            "dtype": dtype,
            "updates": problem.num_updates,
            "weights": digest,
        },
    )
    wrong = [
        f"epoch {epoch}: {len(numbers)} samples were used, of which {len(set(numbers))} are different"
        for epoch, numbers in enumerate(trained.samples)
        if sorted(numbers) != list(range(problem.num_samples))
    ]
    writer.found(
        "data",
        not wrong,
        "; ".join(wrong)
        or _(
            "{epochs} epochs of {num_samples} samples in batches of {batch_size}: each sample once per epoch",
            epochs=EPOCHS,
            num_samples=problem.num_samples,
            batch_size=problem.batch_size,
        ),
        do=_("report this problem and attach the evidence file: samples were repeated or omitted"),
        figures={"epochs": EPOCHS, "samples": problem.num_samples, "batch_size": problem.batch_size},
    )
    return digest


def train_until_killed(accelerator: Accelerator, writer: EvidenceWriter) -> None:
    """Train and save checkpoints until the last rank is killed. Collective."""
    writer.begin("restart")

    def after_update(update: int) -> None:
        if update % SAVE_EVERY == 0:
            accelerator.save_state()
        if update == KILL_AFTER and accelerator.process_index == accelerator.num_processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(accelerator, _problem(accelerator), after_update=after_update)
    raise AssertionError("training finished even though a rank was killed")


def check_restart(accelerator: Accelerator, writer: EvidenceWriter, *, undisturbed: str) -> None:
    """Check that the run resumes from its checkpoint and that its final weights have the digest ``undisturbed``. Collective."""
    trained = train(accelerator, _problem(accelerator), resumes=True)
    digest = broadcast_object_list([_digest(trained.weights)])[0]
    killed, saved = accelerator.num_processes - 1, KILL_AFTER - KILL_AFTER % SAVE_EVERY
    problems = [
        f"expected the ranks to resume from update {saved}, but they resumed from update {trained.resumed_at}"
    ] * (trained.resumed_at != saved)
    problems += ["the weights differ from the weights in an uninterrupted run"] * (digest != undisturbed)
    writer.found(
        "restart",
        not problems,
        _("rank {killed} was killed after update {update}; ", killed=killed, update=KILL_AFTER)
        + (
            _(" and ").join(problems)
            or _("the ranks resumed from update {update} and ended with identical weights", update=saved)
        ),
        do=_(
            "report this problem and attach the evidence file; docs/checkpoints.md describes what is guaranteed "
            "for resumed runs"
        ),
        figures={
            "killed_rank": killed,
            "killed_after_update": KILL_AFTER,
            "went_on_from_update": trained.resumed_at,
            "weights": digest,
            "weights_undisturbed": undisturbed,
        },
    )


def check_bandwidth(accelerator: Accelerator, writer: EvidenceWriter, *, is_quick: bool) -> None:
    """Measure the bandwidth between the ranks. Collective."""
    writer.begin("bandwidth")
    if accelerator.num_processes == 1:
        writer.found("bandwidth", None, _("a single rank does not need to communicate"))
        return
    device = accelerator.device
    sizes = QUICK_SIZES if is_quick else SIZES if device.type == "cpu" else ACCELERATOR_SIZES
    found = measure(sizes, device=device, budget=timedelta(seconds=0.05 if is_quick else 0.2))
    best = max((one for one in found if one.name == "all_reduce"), key=lambda one: one.size_bytes)
    writer.found(
        "bandwidth",
        True,
        _(
            "all_reduce of {size}: {rate:.2f} GB/s bus bandwidth; {number} measurements",
            size=convert_bytes(best.size_bytes),
            rate=best.bus_bytes_per_s / 1e9,
            number=len(found),
        ),
        figures={"backend": accelerator.world.backend, "collectives": [_figures(one) for one in found]},
    )


# ---- parts, each started separately ----------------------------------------------------------------------------------


def part_layout(folder: Path, *, is_quick: bool) -> None:
    """Run all distributed checks in two attempts. The first attempt ends when a rank is killed. Collective."""
    if attempt_number() == "0":
        first_attempt(folder)
    elif (folder / WEIGHTS_FILE).exists():
        second_attempt(folder, is_quick=is_quick)
    else:
        raise LaunchError(
            _("the first attempt failed before the test killed a rank"), do=_("see its error report above")
        )


def first_attempt(folder: Path) -> None:
    """Train without interruption, and then until a rank is killed. Collective."""
    accelerator = _exact(folder, is_shared=True)  # saves nothing
    is_shared = _is_shared(folder)
    writer = _evidence_writer(accelerator, folder, is_shared=is_shared)
    check_world(accelerator, writer)
    digest = check_exact(accelerator, writer)
    writer.keep({"exact": digest, "is_shared": is_shared, "world_size": accelerator.num_processes})
    train_until_killed(_exact(folder, is_shared=is_shared), writer)


def second_attempt(folder: Path, *, is_quick: bool) -> None:
    """Resume the first attempt's run, and run the remaining checks. Collective."""
    known = json.loads((folder / WEIGHTS_FILE).read_text(encoding="utf-8"))
    accelerator = _exact(folder, is_shared=known["is_shared"])
    writer = _evidence_writer(accelerator, folder, is_shared=known["is_shared"])
    check_restart(accelerator, writer, undisturbed=known["exact"])
    check_bandwidth(accelerator, writer, is_quick=is_quick)
    why_not = _why_not_bitwise(accelerator)
    if why_not is None:
        writer.begin("bitwise")
        writer.keep({**known, "bitwise": train_bitwise(accelerator.num_processes)})
    else:
        writer.found("bitwise", None, why_not)
    accelerator.end_training()
    if not writer.is_silent and not (folder / OWNED_FILE).exists():
        shutil.rmtree(folder)  # the command runs on another machine


def part_alone(folder: Path) -> None:
    """Repeat the bitwise run in a single process."""
    before = json.loads((folder / WEIGHTS_FILE).read_text(encoding="utf-8"))
    world_size = before["world_size"]
    digest = train_bitwise(world_size, cpu=True)
    EvidenceWriter(folder, is_silent=False).found(
        "bitwise",
        digest == before["bitwise"],
        _(
            "training on {n} rank{s} and on 1 rank produces {weights}",
            n=world_size,
            s="" if world_size == 1 else "s",
            weights=_("bit-identical weights") if digest == before["bitwise"] else _("different weights"),
        ),
        do=_(
            "compare the torch versions and the CPUs on the machines; if they match, report this problem and "
            "attach the evidence file"
        ),
        figures={"weights": before["bitwise"], "weights_alone": digest},
    )


def train_bitwise(world_size: int, *, cpu: bool = False) -> str:
    """Train with ``parity="bitwise"`` and dropout. Return the weights' digest. Collective."""
    accelerator = Accelerator(parity="bitwise", cpu=cpu, canonical_shards=max(8, world_size), **_settings())
    trained = train(accelerator, Problem(world_size=world_size, dtype=torch.float64), dropout=0.1)
    digest: str = broadcast_object_list([_digest(trained.weights)])[0]
    return digest


def _exact(folder: Path, *, is_shared: bool) -> Accelerator:
    checkpoints = ProjectConfiguration(
        str(folder / "run"), automatic_checkpoint_naming=True, total_limit=2, save_on_each_node=not is_shared
    )
    return Accelerator(
        parity="exact", max_micro_batch_size=MAX_MICRO_BATCH_SIZE, project_config=checkpoints, **_settings()
    )


def _is_shared(folder: Path) -> bool:
    """Return whether all ranks share the directory. Collective."""
    name = f"seen-{secrets.token_hex(8)}"
    if known_rank() in (None, 0):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    name = broadcast_object_list([name])[0]  # not the path, which may differ between machines
    return all(gather_object([(folder / name).exists()]))


def _evidence_writer(accelerator: Accelerator, folder: Path, *, is_shared: bool) -> EvidenceWriter:
    speaks = accelerator.is_main_process if is_shared else accelerator.is_local_main_process
    return EvidenceWriter(folder, is_silent=not speaks)


def _settings() -> dict[str, Any]:
    """Return the settings for every Accelerator, which override the user's config file."""
    return {
        "seed": SEED,
        "mixed_precision": "no",
        "dynamo_backend": "no",
        # Otherwise DDP on three or more ranks rebuilds its buckets after the first step, also in a resumed run, which changes
        # the rounding of its sums (docs/checkpoints.md).
        "kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)],
    }


def _problem(accelerator: Accelerator) -> Problem:
    is_double = accelerator.device.type == "cpu" and accelerator.capabilities.keeps_float64
    return Problem(world_size=accelerator.num_processes, dtype=torch.float64 if is_double else torch.float32)


def _why_not_bitwise(accelerator: Accelerator) -> str | None:
    if accelerator.num_processes == 1:
        return _("there is only one rank, so there is nothing to compare")
    if accelerator.device.type != "cpu":
        return _("not tested on {type}, where the result depends on the kernels", type=accelerator.device.type)
    return None if accelerator.capabilities.sums_shards else _("the engine does not sum gradients in a canonical order")


def _relative_error(weights: Mapping[str, torch.Tensor] | None, reference: Mapping[str, torch.Tensor]) -> float:
    """Return, on rank zero, the largest difference of any weight relative to the largest weight in its tensor."""
    if weights is None:
        return math.inf
    assert weights.keys() == reference.keys(), (weights.keys(), reference.keys())
    errors = [(weights[name] - value).abs().max() / value.abs().max() for name, value in reference.items()]
    return float(torch.stack(errors).max())  # NaN if any is, which exceeds every tolerance


def _digest(weights: Mapping[str, torch.Tensor] | None) -> str | None:
    if weights is None:
        return None
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    # Some backends, such as mps and cpu, have no device names.
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def _figures(one: Measured) -> dict[str, Any]:
    return {
        **asdict(one),
        "algorithm_gb_per_s": one.algorithm_bytes_per_s / 1e9,
        "bus_gb_per_s": one.bus_bytes_per_s / 1e9,
    }


def main(argv: list[str] | None = None) -> None:
    """Run one part of the test. The arguments are its name, the directory for its findings, and --quick."""
    parser = argparse.ArgumentParser(prog="echelon.testing.self_test")
    parser.add_argument("part", choices=("layout", "alone"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(argv)
    if args.part == "layout":
        part_layout(args.folder, is_quick=args.quick)
    else:
        part_alone(args.folder)


if __name__ == "__main__":
    main()
