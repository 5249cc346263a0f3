"""Random scripts without faults, on random layouts: ``echelon verify`` must not report a difference."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from echelon.verify.command.layouts import Layout
from tests.mutants.mutant import CUT_TEXTS, SCRIPTS
from tests.mutants.runner import WarmRecorder, verify_text

_BY_HAND = ("raw_ddp", "level1", "ema_scaler", "fsdp_loop", "resume_loop", "stream")
_ENGINES = ("accelerated", "language_model", "trainer")
_OPTIMIZERS = (
    "torch.optim.SGD({}, lr=0.05)",
    "torch.optim.SGD({}, lr=0.05, momentum=0.9, nesterov=True)",
    "torch.optim.AdamW({}, lr=0.01)",
    "torch.optim.Adam({}, lr=0.003, betas=(0.8, 0.95))",
    "torch.optim.RMSprop({}, lr=0.003)",
    "torch.optim.Adagrad({}, lr=0.02)",
    "torch.optim.NAdam({}, lr=0.005)",
)


@dataclass(frozen=True, kw_only=True)
class CleanRun:
    """A script without faults, and its layout."""

    seed: int
    script: str
    text: str
    layout: Layout
    changes: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is called in a report."""
        return f"{self.seed}: {self.script}, {self.layout.name}, {', '.join(self.changes)}"

    def alarm(self, recorder: WarmRecorder) -> str:
        """Verify it; return what was reported (empty: nothing)."""
        recorder.fault = ""
        result = verify_text(self.text, self.layout, recorder, steps=6)
        if result.outcome == "same":
            return ""
        verdict = result.verdict
        if verdict is None or verdict.finding is None:
            return f"{self.name}: {result.outcome}: {verdict.reason if verdict else result.failure}"
        found = verdict.finding
        return f"{self.name}: update {found.update}, {found.stage}: {found.what} ({found.cause})"


def clean_run(seed: int) -> CleanRun:
    """Return a script and a layout that follow from the seed."""
    choose = random.Random(seed)
    script = choose.choice(_BY_HAND + _ENGINES)
    text = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8")
    changes: list[str] = []

    def replace(pattern: str, new: str, name: str) -> None:
        nonlocal text
        text, count = re.subn(pattern, new, text)
        if count:
            changes.append(name)

    world_size = choose.choice((1, 2, 2, 3, 4))
    engine = choose.choice((None, "ddp", "zero1", "fsdp2")) if script in _ENGINES else None
    size = choose.choice((2, 3, 4, 5))
    if script != "trainer":
        # As many samples as all ranks use in whole updates of any size, so that no layout repeats or drops one.
        replace(
            r"BATCH_SIZE, ACCUMULATION, MAX_NORM = 3, \d, \d",
            f"BATCH_SIZE, ACCUMULATION, MAX_NORM = 3, {size}, {choose.choice((1, 2, 3))}",
            f"batch {size}",
        )
        replace(r"EPOCHS, BATCH_SIZE = \d, \d", f"EPOCHS, BATCH_SIZE = 4, {size}", f"batch {size}")
        count = 6 * size * world_size * choose.choice((1, 2))
        if script == "ema_scaler":  # one of the first 31 samples is damaged
            count *= math.ceil(31 / count)
        replace(r"count=\d+", f"count={count}", "other samples")
    else:
        replace(r"per_device_train_batch_size=2", f"per_device_train_batch_size={size}", f"batch {size}")
        replace(
            r"gradient_accumulation_steps=2", f"gradient_accumulation_steps={choose.choice((1, 2, 3))}", "accumulation"
        )
        replace(r"count=40", f"count={12 * size * world_size}", "other samples")
        if choose.random() < 0.3:
            replace(r"            seed=5,", '            seed=5,\n            parity="exact",', "parity exact")
    seeds = choose.randrange(1000)
    replace(r"torch\.manual_seed\(0\)", f"torch.manual_seed({seeds})", f"seed {seeds}")
    replace(r"Dropout\(0\.1\)", f"Dropout({choose.choice((0.0, 0.2, 0.5))})", "dropout")
    replace(
        r"MAX_NORM = (\d), (\d), (\d), [\d.]+", rf"MAX_NORM = \1, \2, \3, {choose.choice((0.05, 0.5, 5.0))}", "max_norm"
    )
    width = choose.choice((5, 16, 33))
    replace(r"\b16\b(?=[,)])", str(width), f"width {width}")
    if choose.random() < 0.6 and script not in ("level1", "trainer"):
        optimizer = choose.choice(_OPTIMIZERS).format("model.parameters()")
        replace(r"torch\.optim\.\w+\(model\.parameters\(\)[^\n]*\)", optimizer, optimizer)
    if script in ("accelerated", "language_model") and choose.random() < 0.3:
        replace(r"seed=11\)", f'seed=11, parity="{choose.choice(("exact", "bitwise"))}")', "parity")
    if choose.random() < 0.3:
        replace(r"torch\.tanh\(", "F.silu(", "silu")
    if script == "language_model" and choose.random() < 0.5:
        for old, new in CUT_TEXTS:
            replace(re.escape(old), new, "texts cut by the batch")
    return CleanRun(
        seed=seed,
        script=script,
        text=text,
        layout=Layout(num_processes=world_size, engine=engine),
        changes=tuple(changes),
    )
