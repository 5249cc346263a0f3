"""Faults in what the ranks read, draw at random, and compute in the forward pass."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

_SAMPLER = "sampler = DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK, shuffle=True, seed=3)"
_SHARD = "data = torch.utils.data.Subset(data, range(RANK, len(data), WORLD_SIZE))"
_RAW = "raw_ddp"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="no set_epoch: the same order in each epoch",
        script=_RAW,
        edits=(("        sampler.set_epoch(epoch)\n", ""),),
        against="correct",
        update=3,
        stages=("data",),
    ),
    Mutant(
        name="set_epoch on rank 0 only",
        script=_RAW,
        edits=(("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch if RANK == 0 else 0)"),),
        update=3,
        stages=("data",),
    ),
    Mutant(
        name="a sampler seed per rank",
        script=_RAW,
        edits=(("seed=3)", "seed=3 + RANK)"),),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="no sharding: all ranks read all samples",
        script=_RAW,
        edits=(("num_replicas=WORLD_SIZE, rank=RANK", "num_replicas=1, rank=0"),),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="data sharded twice",
        script=_RAW,
        edits=(("    data = make_data()\n", f"    data = make_data(80)\n    {_SHARD}\n"),),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="each rank shuffles its own shard",
        script=_RAW,
        edits=((_SAMPLER, f"{_SHARD}\n    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)"),),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="padding of the sampler repeats a sample",
        script=_RAW,
        edits=(("count=40", "count=39"),),
        has_probe=False,
        update=2,
        stages=("data",),
    ),
    Mutant(
        name="drop_last drops what one process uses",
        script=_RAW,
        edits=(("count=40", "count=41"), ("seed=3)", "seed=3, drop_last=True)")),
        has_probe=False,
        update=2,
        stages=("data",),
    ),
    Mutant(
        name="rank 0 trains on the shard of rank 1",
        script=_RAW,
        edits=(("rank=RANK, shuffle", "rank=WORLD_SIZE - 1, shuffle"),),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="a stream that is not split between the ranks",
        script="stream",
        edits=(("order[RANK::WORLD_SIZE]", "order"),),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="a stream cut in halves, one per rank",
        script="stream",
        edits=(
            (
                "order[RANK::WORLD_SIZE]",
                "order[RANK * len(order) // WORLD_SIZE : (RANK + 1) * len(order) // WORLD_SIZE]",
            ),
        ),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="a stream shuffled with a seed per rank",
        script="stream",
        edits=(("manual_seed(self.epoch)", "manual_seed(self.epoch + 100 * RANK)"),),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="a stream without a new order in each epoch",
        script="stream",
        edits=(("readings.epoch = epoch", "readings.epoch = 0"),),
        against="correct",
        update=4,
        stages=("data",),
    ),
    Mutant(
        name="the Accelerator's loader declared unsharded, which it is not meant to be",
        script="accelerated",
        edits=(
            (
                "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)",
                "model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)\n"
                "    accelerator.allow_unsharded(loader)",
            ),
            ("        loader.set_epoch(epoch)\n", ""),
        ),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="the Trainer's dataset already cut by the script",
        script="trainer",
        edits=(
            (
                "train_dataset=make_texts()",
                'train_dataset=make_texts(80)[int(__import__("os").environ.get("RANK", 0)) :: 2]',
            ),
        ),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="the Trainer's dataset shuffled with a seed per rank",
        script="trainer",
        edits=(
            (
                "train_dataset=make_texts()",
                'train_dataset=__import__("random").Random(int(__import__("os").environ.get("RANK", 0))).sample(make_texts(), 40)',
            ),
        ),
        update=0,
        stages=("data",),
    ),
    Mutant(
        name="equal dropout masks on all ranks",
        script=_RAW,
        edits=(("torch.manual_seed(100 + RANK)", "torch.manual_seed(100)"),),
        update=0,
        stages=("rng",),
    ),
    Mutant(
        name="equal dropout masks on all ranks, Accelerator",
        script="accelerated",
        edits=(("torch.manual_seed(100 + accelerator.process_index)", "torch.manual_seed(100)"),),
        update=0,
        stages=("rng",),
    ),
    Mutant(
        name="equal dropout masks on all ranks, fsdp2",
        script="language_model",
        engine="fsdp2",
        edits=(("torch.manual_seed(100 + accelerator.process_index)", "torch.manual_seed(100)"),),
        update=0,
        stages=("rng",),
    ),
    Mutant(
        name="ranks seeded anew, and alike, in each epoch",
        script="resume_loop",
        edits=(
            (
                "        sampler.set_epoch(epoch)\n",
                "        sampler.set_epoch(epoch)\n        torch.manual_seed(epoch)\n",
            ),
        ),
        update=0,
        stages=("rng",),
    ),
    Mutant(
        name="the same dropout masks in each step",
        script="resume_loop",
        edits=(
            (
                "            optimizer.zero_grad()\n",
                "            optimizer.zero_grad()\n            torch.manual_seed(100 + RANK)\n",
            ),
        ),
        against="correct",
        update=1,
        stages=("rng",),
    ),
    Mutant(
        name="batch norm per rank",
        script=_RAW,
        edits=(("self.norm = GlobalBatchNorm(16)", "self.norm = nn.BatchNorm1d(16)"),),
        update=0,
        stages=("forward",),
        tensors="norm",
    ),
    Mutant(
        name="inputs normalized per rank",
        script=_RAW,
        edits=(
            ("loss = F.cross_entropy(model(x), y)", "loss = F.cross_entropy(model((x - x.mean(0)) / x.std(0)), y)"),
        ),
        update=0,
        stages=("forward",),
        tensors="first",
    ),
    Mutant(
        name="inputs scaled on one rank",
        script=_RAW,
        edits=(("model(x)", "model(x * (1 + 0.1 * RANK))"),),
        update=0,
        stages=("forward",),
        tensors="first",
    ),
    Mutant(
        name="padding leaks into the outputs",
        script="language_model",
        edits=(
            ("return self.head(x + self", "x = x + x.mean(dim=1, keepdim=True)\n        return self.head(x + self"),
        ),
        update=0,
        stages=("forward",),
        tensors="mix",
    ),
    Mutant(
        name="the model left in eval mode after an evaluation",
        script="resume_loop",
        edits=(
            (
                "        done = update % per_epoch\n",
                "        done = update % per_epoch\n        net.train(epoch == 0)\n",
            ),
        ),
        against="correct",
        update=4,
        stages=("forward", "buffers"),
        tensors="*",
    ),
    Mutant(
        name="one rank in eval mode",
        script="resume_loop",
        edits=(
            (
                "        done = update % per_epoch\n",
                "        done = update % per_epoch\n        net.train(RANK == 0)\n",
            ),
        ),
        update=0,
        stages=("forward", "buffers"),
        tensors="*",
    ),
    Mutant(
        name="labels in the wrong order on one rank",
        script=_RAW,
        edits=(("model(x), y)", "model(x), y.roll(RANK))"),),
        update=0,
        stages=("loss weight", "backward"),
        tensors="*",
    ),
)
