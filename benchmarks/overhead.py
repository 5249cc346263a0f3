"""Measures the overhead of each library per training step: microseconds over a plain PyTorch loop, all in one run.

One thread and a tiny MLP, so that the work of torch is small and the same for all variants: AdamW, a scheduler, and a loader whose
items are whole batches. Every variant gets the same objects in a separate process. The processes take turns of a few steps on one
processor, because the speed of a shared machine varies from second to second by more than the overhead.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

import torch
from results import footer, installed, publish
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

HEADING = "## Overhead of a training step"
PEERS = ("accelerate", "lightning", "transformers")
BATCH = 8
SETTLING, STEPS = (
    4,
    12,
)  # steps of a turn: unmeasured ones that warm the caches, and measured ones; multiples of an update
WARM_UP = 10  # rounds
ACCUMULATION = 4
PLAIN, CLIPPING, ACCUMULATING = "plain loop", "plain loop with clipping", "plain loop with accumulation"
TARGETS = (  # variant, compared with, baseline, maximum ratio, maximum of what it adds in microseconds
    ("echelon Accelerator", "accelerate", PLAIN, 0.12, 25),
    ("echelon Accelerator", "Lightning Fabric", PLAIN, 1.0, 25),
    ("echelon Accelerator, accumulating", "accelerate, accumulating", ACCUMULATING, 0.12, 25),
    ("echelon Trainer", "transformers Trainer", PLAIN, 0.08, 60),
    ("echelon Trainer, clipping", "transformers Trainer, clipping", CLIPPING, 0.08, 60),
)
UNRECORDED = ", recording off"


class Batches(Dataset[dict[str, torch.Tensor]]):
    """Prepared batches that also measure the time, as only the code of the library runs between two of them.

    Args:
        rounds: number of turns of this process.
        turn: connection on which it waits for its turn and reports the duration of a step.
    """

    def __init__(self, rounds: int, turn: Connection) -> None:
        generator = torch.Generator().manual_seed(0)
        self.items = [
            {"inputs": torch.randn(BATCH, 16, generator=generator), "labels": torch.randint(4, (BATCH,))}
            for _ in range(32)
        ]
        self._num = rounds * (SETTLING + STEPS) + 1
        self._turn = turn
        self._taken = 0
        self._times: list[float] = []  # at the start of each measured update, and at the end

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        position = self._taken % (SETTLING + STEPS)
        self._taken += 1
        if position % ACCUMULATION == 0 and (position >= SETTLING or position == 0):
            self._times.append(time.process_time())
        if position == 0:
            if self._taken > 1:
                self._turn.send([1e6 * (end - begin) / ACCUMULATION for begin, end in pairwise(self._times)])
            if self._taken < self._num:
                self._turn.recv()
            self._times.clear()
        return self.items[number % 32]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def first(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the only item of a loader's batch, which is a whole batch already."""
    return items[0]


def parts(batches: Batches) -> tuple[Net, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = len(batches)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    return model, optimizer, scheduler, DataLoader(batches, batch_size=1, shuffle=True, collate_fn=first)


def plain(batches: Batches, max_norm: float | None = None) -> None:
    model, optimizer, scheduler, loader = parts(batches)
    for batch in loader:
        loss = model(**batch)["loss"]
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def plain_with_clipping(batches: Batches) -> None:
    plain(batches, max_norm=1.0)  # the default of both Trainers


def plain_with_accumulation(batches: Batches) -> None:
    model, optimizer, scheduler, loader = parts(batches)
    for number, batch in enumerate(loader, 1):
        loss = model(**batch)["loss"]
        (loss / ACCUMULATION).backward()
        if number % ACCUMULATION == 0 or number == len(batches):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def own_loop(accelerator: Any, batches: Batches) -> None:
    """The script for both libraries; only the import of the Accelerator differs."""
    model, optimizer, scheduler, loader = accelerator.prepare(*parts(batches))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def level_2(batches: Batches, accumulation: int = 1) -> None:
    from echelon import Accelerator

    own_loop(Accelerator(cpu=True, gradient_accumulation_steps=accumulation), batches)


def accelerate(batches: Batches, accumulation: int = 1) -> None:
    from accelerate import Accelerator

    own_loop(Accelerator(cpu=True, gradient_accumulation_steps=accumulation), batches)


def fabric(batches: Batches) -> None:
    from lightning.fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1)
    model, optimizer, scheduler, loader = parts(batches)
    model, optimizer = lightning.setup(model, optimizer)
    loader = lightning.setup_dataloaders(loader)
    for batch in loader:
        loss = model(**batch)["loss"]
        lightning.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def train(library: Any, batches: Batches, max_norm: float, accumulation: int = 1) -> None:
    """The call for both Trainers, without logs, evaluation, checkpoints and progress bar."""
    model, optimizer, scheduler, _ = parts(batches)
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=1,
            num_train_epochs=1,
            logging_strategy="no",
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            max_grad_norm=max_norm,  # 0: do not clip
            gradient_accumulation_steps=accumulation,
        )
        trainer = library.Trainer(
            model=model,
            args=arguments,
            train_dataset=batches,
            data_collator=first,
            optimizers=(optimizer, scheduler),
        )
        trainer.train()


def level_3(batches: Batches, max_norm: float = 0.0, accumulation: int = 1) -> None:
    import echelon.trainer as library

    train(library, batches, max_norm, accumulation)


def transformers(batches: Batches, max_norm: float = 0.0) -> None:
    import transformers as library

    train(library, batches, max_norm)


VARIANTS: dict[str, tuple[str | None, Callable[[Batches], None]]] = {
    PLAIN: (None, plain),
    CLIPPING: (None, plain_with_clipping),
    ACCUMULATING: (None, plain_with_accumulation),
    "echelon Accelerator": (None, level_2),
    "accelerate": ("accelerate", accelerate),
    "echelon Accelerator, accumulating": (None, partial(level_2, accumulation=ACCUMULATION)),
    "accelerate, accumulating": ("accelerate", partial(accelerate, accumulation=ACCUMULATION)),
    "Lightning Fabric": ("lightning", fabric),
    "echelon Accelerator" + UNRECORDED: (None, level_2),
    "echelon Trainer" + UNRECORDED: (None, level_3),
    "echelon Trainer": (None, level_3),
    "transformers Trainer": ("transformers", transformers),
    "echelon Trainer, clipping": (None, partial(level_3, max_norm=1.0)),
    "transformers Trainer, clipping": ("transformers", partial(transformers, max_norm=1.0)),
}


def serve(name: str, rounds: int, turn: Connection) -> None:
    """Run the process of one variant."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if name.endswith(UNRECORDED):
        os.environ["ECHELON_NO_RECORD"] = "1"
    folder = (
        tempfile.mkdtemp()
    )  # echelon records the run in the current folder, and completes the record before this is removed
    util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=0)
    os.chdir(folder)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    gc.collect()
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        VARIANTS[name][1](Batches(rounds, turn))


def measure(names: list[str], *, rounds: int) -> dict[str, list[float]]:
    """Return microseconds per step for each variant: the mean of every measured update."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[float]] = {name: [] for name in names}
    turns: dict[str, Connection] = {}
    for name in names:
        turns[name], its = context.Pipe()
        context.Process(target=serve, args=(name, WARM_UP + rounds, its), daemon=True).start()
        its.close()
    order = random.Random(0)
    for number in tqdm(range(WARM_UP + rounds), desc="rounds", disable=not sys.stderr.isatty()):
        for name in order.sample(names, len(names)):
            turns[name].send(None)
            taken = turns[name].recv()
            if number >= WARM_UP:
                found[name] += taken
    return found


def table(found: dict[str, list[float]]) -> str:
    rows = ["| variant | us per step, fast | median | middle half | adds | to |", "|---|---:|---:|---:|---:|---|"]
    for name, values in found.items():
        base = base_store(name)
        more = f"{undisturbed(values) - undisturbed(found[base]):.0f} | {base}" if base in found else " | "
        low, middle, high = statistics.quantiles(values)
        rows.append(f"| {name} | {undisturbed(values):.0f} | {middle:.0f} | {low:.0f} - {high:.0f} | {more} |")
    return "\n".join(rows)


def base_store(name: str) -> str | None:
    """Return the plain loop that does the same work."""
    if name in (PLAIN, CLIPPING, ACCUMULATING):
        return None
    return CLIPPING if name.endswith("clipping") else ACCUMULATING if name.endswith("accumulating") else PLAIN


def undisturbed(values: list[float]) -> float:
    """Return the time that a twentieth of the updates is faster than, because disturbances only increase the time."""
    return statistics.quantiles(values, n=20)[0]


def ratios(found: dict[str, list[float]]) -> str:
    lines = []
    for ours, theirs, base, limit, limit_us in TARGETS:
        if not {ours, theirs, base} <= found.keys():
            continue
        ratio = ratio_of(*(found[name] for name in (ours, theirs, base)))
        chance = random.Random(0)
        again = sorted(
            ratio_of(*(chance.choices(found[name], k=len(found[name])) for name in (ours, theirs, base)))
            for _ in range(200)
        )
        added = undisturbed(found[ours]) - undisturbed(found[base])
        lines.append(
            f"- {ours} adds {added:.0f} us to the {base} (target: {limit_us} us, {'met' if added <= limit_us else 'missed'}), "
            f"which is {ratio:.2f} times the overhead of {theirs} (target: {limit}, {'met' if ratio <= limit else 'missed'}; "
            f"95 % of resampled measurements: {again[5]:.2f} - {again[-6]:.2f})"
        )
    return "\n".join(lines)


def ratio_of(ours: list[float], theirs: list[float], base: list[float]) -> float:
    return (undisturbed(ours) - undisturbed(base)) / (undisturbed(theirs) - undisturbed(base))


def report(found: dict[str, list[float]], *, rounds: int) -> str:
    return f"""{HEADING}

A 16-32-4 MLP, batches of {BATCH}, AdamW, a scheduler; one process per variant, one thread, all on one processor.
The values are microseconds of CPU time per step (without waiting for a busy machine), of {rounds} rounds. In each round
every variant makes {SETTLING} unmeasured and {STEPS} measured steps. "Fast" is the time that the fastest twentieth of the updates does not exceed, and
"adds" is the difference between two such times: disturbances only lengthen a step, so the fast ones are least disturbed. echelon runs with its defaults: it records each
step, which its peers do not, except in the rows "recording off" (`ECHELON_NO_RECORD=1`). The Trainers clip gradients by default, so they are listed with and without clipping;
transformers computes the norm in both cases. Accumulating loops update once every {ACCUMULATION} steps.

{table(found)}

{ratios(found)}

{footer("overhead.py", *PEERS, needs_peers=True)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--only", action="append", help="part of the name of a variant; may be repeated")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    options = parser.parse_args()
    missing = [name for name in PEERS if not installed(name)]
    if missing:
        print(f"!! {', '.join(missing)} not installed: only echelon is measured. To compare: make peers, make bench.")
    if missing and options.write:
        sys.exit("--write requires all peers, because the table compares them")
    chosen = [
        name
        for name, (package, _) in VARIANTS.items()
        if package not in missing
        and (not options.only or name in (PLAIN, CLIPPING, ACCUMULATING) or any(o in name for o in options.only))
    ]
    section = report(measure(chosen, rounds=options.rounds), rounds=options.rounds)
    publish(section, is_written=options.write)


if __name__ == "__main__":
    main()
