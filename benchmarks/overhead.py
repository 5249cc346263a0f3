"""What each library adds to one training step: microseconds over a plain PyTorch loop, all measured in one run.

One process, one thread, a tiny MLP, so that the work of torch is small and the same for all: AdamW, a scheduler, and a
loader whose item is a whole batch. Every variant gets the same objects, fresh in each round, and takes its turn.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "## Overhead of a training step"
PEERS = ("accelerate", "lightning", "transformers")
BATCH = 8
WARM_UP = 50
ACCUMULATION = 4
PLAIN, CLIPPING, ACCUMULATING = "plain loop", "plain loop that clips", "plain loop that accumulates"
TARGETS = (  # what, beside what, over what, at most
    ("echelon Accelerator", "accelerate", PLAIN, 0.25),
    ("echelon Accelerator, accumulating", "accelerate, accumulating", ACCUMULATING, 0.25),
    ("echelon Trainer", "transformers Trainer", PLAIN, 0.2),
    ("echelon Trainer, clipping", "transformers Trainer, clipping", CLIPPING, 0.2),
)


class Batches(Dataset[dict[str, torch.Tensor]]):
    """``steps`` ready batches, which also tell the time: nothing but the library's own code runs between two of them."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.items = [
            {"inputs": torch.randn(BATCH, 16, generator=generator), "labels": torch.randint(4, (BATCH,))}
            for _ in range(32)
        ]
        self.steps = steps
        self.taken = 0
        self.started = self.ended = 0.0

    def __len__(self) -> int:
        return WARM_UP + self.steps + 1

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self.taken += 1
        if self.taken == WARM_UP + 1:
            self.started = time.process_time()
        elif self.taken == len(self):
            self.ended = time.process_time()
        return self.items[number % 32]

    @property
    def microseconds(self) -> float:
        assert self.taken == len(self), (self.taken, len(self))
        return 1e6 * (self.ended - self.started) / self.steps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def first(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate the one item of a loader's batch: it is a whole batch already."""
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
    plain(batches, max_norm=1.0)  # as both Trainers do by default


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
    """The same script for both: only the import of the Accelerator differs."""
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

    forget_accelerate()
    own_loop(Accelerator(cpu=True, gradient_accumulation_steps=accumulation), batches)


def forget_accelerate() -> None:
    """Empty what accelerate keeps for the whole process: the last round's loaders and settings."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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


def train(library: Any, batches: Batches, max_norm: float) -> None:
    """The same call for both Trainers: no log, no evaluation, no checkpoint, no bar."""
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
        )
        trainer = library.Trainer(
            model=model,
            args=arguments,
            train_dataset=batches,
            data_collator=first,
            optimizers=(optimizer, scheduler),
        )
        trainer.train()


def level_3(batches: Batches, max_norm: float = 0.0) -> None:
    import echelon.trainer as library

    train(library, batches, max_norm)


def transformers(batches: Batches, max_norm: float = 0.0) -> None:
    import transformers as library

    forget_accelerate()
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
    "echelon Trainer": (None, level_3),
    "transformers Trainer": ("transformers", transformers),
    "echelon Trainer, clipping": (None, partial(level_3, max_norm=1.0)),
    "transformers Trainer, clipping": ("transformers", partial(transformers, max_norm=1.0)),
}


def measure(variants: dict[str, Callable[[Batches], None]], *, turns: int, steps: int) -> dict[str, list[float]]:
    """Return microseconds per step, by variant and turn."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(turns + 1):
        for name, run in variants.items():  # interleaved: a busy moment of the machine hits all alike
            batches = Batches(steps if number > 0 else 1)
            gc.collect()
            with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                warnings.simplefilter("ignore")
                run(batches)
            if number > 0:  # the first only imports and warms up
                found[name].append(batches.microseconds)
    return found


def table(found: dict[str, list[float]]) -> str:
    rows = ["| variant | us per step | least - most | adds | to |", "|---|---:|---:|---:|---|"]
    for name, values in found.items():
        base = base_of(name)
        more = f"{adds(found, name, base):.0f} | {base}" if base in found else " | "
        rows.append(f"| {name} | {statistics.median(values):.0f} | {min(values):.0f} - {max(values):.0f} | {more} |")
    return "\n".join(rows)


def base_of(name: str) -> str | None:
    """The plain loop that does the same work."""
    if name in (PLAIN, CLIPPING, ACCUMULATING):
        return None
    return CLIPPING if name.endswith("clipping") else ACCUMULATING if name.endswith("accumulating") else PLAIN


def adds(found: dict[str, list[float]], name: str, base: str) -> float:
    """What a variant costs more than its base, turn by turn: the machine changes its speed between turns."""
    return statistics.median(mine - its for mine, its in zip(found[name], found[base], strict=True))


def ratios(found: dict[str, list[float]]) -> str:
    lines = []
    for ours, theirs, base, limit in TARGETS:
        if {ours, theirs, base} <= found.keys():
            least = {name: min(found[name]) for name in (ours, theirs, base)}
            ratio = (least[ours] - least[base]) / (least[theirs] - least[base])
            middle = adds(found, ours, base) / adds(found, theirs, base)
            verdict = "met" if ratio <= limit else "missed"
            lines.append(
                f"- {ours} adds {ratio:.2f} x what {theirs} adds to the {base} (target: {limit}, {verdict}; by the "
                f"medians {middle:.2f})"
            )
    return "\n".join(lines)


def report(found: dict[str, list[float]], *, turns: int, steps: int) -> str:
    packages = ("torch", *PEERS, "echelon")
    versions = ", ".join(f"{name} {version(name)}" for name in packages if installed(name))
    return f"""{HEADING}

A 16-32-4 MLP, batches of {BATCH}, AdamW, a scheduler; one process, one thread. Microseconds of CPU time per step (waiting for a
busy machine does not count), the median of {turns} turns of {steps} steps, each with fresh objects; the variants take turns.
"Adds" is the median of the differences, turn by turn. The ratios below are those of the least times, as noise only ever adds.
The Trainers clip gradients by default, so they appear with and without; transformers computes the norm in both cases.
Accumulating loops update once in {ACCUMULATION} steps.

{table(found)}

{ratios(found)}

{date.today()}, {processor()}, Python {platform.python_version()}; {versions}.
Repeat: `make peers`, then `.venv-peers/bin/python benchmarks/overhead.py --write`.
"""


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def write(section: str) -> None:
    """Put ``section`` into RESULTS.md in the place of the one with the same heading."""
    text = RESULTS.read_text() if RESULTS.exists() else "# Results of the benchmarks\n"
    before, _, rest = text.partition(section.partition("\n")[0] + "\n")
    end = rest.find("\n## ")
    after = rest[end + 1 :] if end >= 0 else ""
    RESULTS.write_text(before.rstrip() + "\n\n" + section + ("\n" + after if after else ""))


def installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", action="append", help="a part of a variant's name; may be repeated")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/RESULTS.md")
    options = parser.parse_args()
    missing = [name for name in PEERS if not installed(name)]
    if missing:
        print(
            f"!! {', '.join(missing)} not installed here: only echelon is measured. To compare: make peers, make bench."
        )
    if missing and options.write:
        sys.exit("--write needs all peers: a table without them says nothing")
    chosen = {
        name: run
        for name, (package, run) in VARIANTS.items()
        if package not in missing
        and (not options.only or name in (PLAIN, CLIPPING, ACCUMULATING) or any(o in name for o in options.only))
    }
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    found = measure(chosen, turns=options.turns, steps=options.steps)
    section = report(found, turns=options.turns, steps=options.steps)
    print(section)
    if options.write:
        write(section)


if __name__ == "__main__":
    main()
