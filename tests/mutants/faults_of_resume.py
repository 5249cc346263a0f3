"""Faults in saving, loading and continuing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LOOP = "resume_loop"
_AFTER = (6, 6)


def _resumed(name: str, old: str, new: str, **options: object) -> Mutant:
    values: dict[str, object] = {
        "script": _LOOP,
        "against": "correct",
        "resume": _AFTER,
        "update": 6,
        "edits": ((old, new),),
        **options,
    }
    return Mutant(name=name, **values)  # type: ignore[arg-type]


MUTANTS: tuple[Mutant, ...] = (
    _resumed("resumed run starts its epoch again", "done = update % per_epoch", "done = 0", stages=("data",)),
    _resumed("resumed run repeats one batch", "if i < done:", "if i < done - 1:", stages=("data",)),
    _resumed(
        "resumed run skips one batch too many",
        "if i < done:",
        "if i < done + (epoch == 1 and bool(options.resume)):",
        stages=("data",),
    ),
    _resumed(
        "resumed run shuffles with the wrong epoch",
        "sampler.set_epoch(epoch)",
        "sampler.set_epoch(epoch - (epoch if options.resume else 0))",
        stages=("data",),
    ),
    _resumed(
        "position in the data divided by the ranks twice",
        'update = saved["update"]',
        'update = saved["update"] // WORLD_SIZE',
        stages=("data",),
    ),
    _resumed(
        "weights not loaded (keys with another prefix, strict=False)",
        'net.load_state_dict(saved["model"])',
        'net.load_state_dict({f"module.{k}": v for k, v in saved["model"].items()}, strict=False)',
        update=5,
        stages=("load",),
        tensors="*",
    ),
    _resumed(
        "weights loaded on rank 0 only",
        '        net.load_state_dict(saved["model"])\n',
        '        if RANK == 0:\n            net.load_state_dict(saved["model"])\n',
        update=5,
        stages=("load",),
        tensors="*",
    ),
    _resumed(
        "one layer not loaded",
        'net.load_state_dict(saved["model"])',
        'net.load_state_dict({k: v for k, v in saved["model"].items() if "head" not in k}, strict=False)',
        update=5,
        stages=("load",),
        tensors="head.*",
    ),
    _resumed(
        "buffers stale after the load",
        'net.load_state_dict(saved["model"])',
        'net.load_state_dict({k: v for k, v in saved["model"].items() if k != "center"}, strict=False)',
        update=5,
        stages=("load",),
        tensors="*center",
        effect="center",
    ),
    _resumed(
        "optimizer starts afresh",
        '        optimizer.load_state_dict(saved["optimizer"])\n',
        "",
        stages=("load",),
        tensors="*",
    ),
    _resumed(
        "optimizer state in the wrong order",
        '        optimizer.load_state_dict(saved["optimizer"])\n',
        '        state = saved["optimizer"]["state"]\n        state[1], state[3] = {**state[1]}, {**state[3]}\n'
        '        for key in ("exp_avg", "exp_avg_sq"):\n'
        "            state[1][key], state[3][key] = state[1][key].roll(1), state[3][key].roll(1)\n"
        '        optimizer.load_state_dict(saved["optimizer"])\n',
        stages=("load",),
        tensors="*.bias",
    ),
    _resumed(
        "step count of Adam not loaded",
        '        optimizer.load_state_dict(saved["optimizer"])\n',
        '        for state in saved["optimizer"]["state"].values():\n            state["step"] = torch.tensor(0.0)\n'
        '        optimizer.load_state_dict(saved["optimizer"])\n',
        stages=("load",),
        tensors="*",
    ),
    _resumed(
        "schedule starts afresh",
        '        schedule.load_state_dict(saved["schedule"])\n',
        "",
        stages=("scheduler", "load"),
        effect="lr",
    ),
    _resumed(
        "schedule one step behind after the load",
        '        schedule.load_state_dict(saved["schedule"])\n',
        '        schedule.load_state_dict({**saved["schedule"], "last_epoch": saved["schedule"]["last_epoch"] - 1})\n',
        stages=("scheduler", "load"),
        update=7,
        effect="lr",
    ),
    _resumed(
        "random numbers not restored",
        '        torch.set_rng_state(saved["rng"][RANK])\n',
        "",
        stages=("load", "rng"),
    ),
    _resumed(
        "all ranks resume with the random numbers of rank 0",
        'saved["rng"][RANK]',
        'saved["rng"][0]',
        stages=("rng", "load"),
    ),
    _resumed(
        "weights saved in bfloat16",
        '"model": net.state_dict(),',
        '"model": {k: v.bfloat16() if v.is_floating_point() else v for k, v in net.state_dict().items()},',
        update=5,
        stages=("save", "load"),
        tensors="*",
    ),
    _resumed(
        "weights saved before the update",
        "            optimizer.step()\n",
        "            before = {k: v.clone() for k, v in net.state_dict().items()}\n            optimizer.step()\n",
        edits=(
            (
                "            optimizer.step()\n",
                "            before = {k: v.clone() for k, v in net.state_dict().items()}\n            optimizer.step()\n",
            ),
            ('"model": net.state_dict(),', '"model": before,'),
        ),
        update=5,
        stages=("save", "load"),
        tensors="*",
    ),
    _resumed(
        "Accelerator: resumed run does not skip its batches",
        "skip_first_batches(loader, skipped)",
        "skip_first_batches(loader, 0)",
        script="accelerated",
        resume=(4, 4),
        update=4,
        stages=("data",),
    ),
    _resumed(
        "Accelerator: batches skipped as updates",
        "divmod(updates * ACCUMULATION, len(loader))",
        "divmod(updates, len(loader))",
        script="accelerated",
        resume=(4, 4),
        update=4,
        stages=("data",),
    ),
    _resumed(
        "Accelerator: one update too many skipped",
        "updates = options.after\n",
        "updates = options.after + 1\n",
        script="accelerated",
        resume=(4, 4),
        update=4,
        stages=("data",),
    ),
    _resumed(
        "Accelerator: wrong epoch after the load",
        "loader.set_epoch(epoch)",
        "loader.set_epoch(epoch - first_epoch)",
        script="accelerated",
        resume=(4, 4),
        update=4,
        stages=("data",),
    ),
    _resumed(
        "Accelerator: schedule not prepared, so not saved",
        "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        script="accelerated",
        resume=(4, 4),
        update=4,
        stages=("scheduler", "load"),
        effect="lr",
    ),
)
