"""Faults in what the ranks read, draw at random, and compute in the forward pass."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

_SAMPLER = "sampler = DistributedSampler(data, num_replicas=WORLD_SIZE, rank=RANK, shuffle=True, seed=3)"
_SHARD = "data = torch.utils.data.Subset(data, range(RANK, len(data), WORLD_SIZE))"
_RAW = "raw_ddp"

MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "no set_epoch: the same order in each epoch",
        "raw_ddp: data in update 3",
        ("        sampler.set_epoch(epoch)\n", ""),
        against="correct",
    ),
    mutant(
        "set_epoch on rank 0 only",
        "raw_ddp: data in update 3",
        ("sampler.set_epoch(epoch)", "sampler.set_epoch(epoch if RANK == 0 else 0)"),
    ),
    mutant("a sampler seed per rank", "raw_ddp: data in update 0", ("seed=3)", "seed=3 + RANK)")),
    mutant(
        "no sharding: all ranks read all samples",
        "raw_ddp: data in update 0",
        ("num_replicas=WORLD_SIZE, rank=RANK", "num_replicas=1, rank=0"),
    ),
    mutant(
        "data sharded twice",
        "raw_ddp: data in update 0",
        ("    data = make_data()\n", f"    data = make_data(80)\n    {_SHARD}\n"),
    ),
    mutant(
        "each rank shuffles its own shard",
        "raw_ddp: data in update 0",
        (_SAMPLER, f"{_SHARD}\n    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)"),
    ),
    mutant(
        "padding of the sampler repeats a sample",
        "raw_ddp: data in update 2",
        ("count=40", "count=39"),
        has_probe=False,
    ),
    mutant(
        "drop_last drops what one process uses",
        "raw_ddp: data in update 2",
        ("count=40", "count=41"),
        ("seed=3)", "seed=3, drop_last=True)"),
        has_probe=False,
    ),
    mutant(
        "rank 0 trains on the shard of rank 1",
        "raw_ddp: data in update 0",
        ("rank=RANK, shuffle", "rank=WORLD_SIZE - 1, shuffle"),
    ),
    mutant(
        "a stream that is not split between the ranks", "stream: data in update 0", ("order[RANK::WORLD_SIZE]", "order")
    ),
    mutant(
        "a stream cut in halves, one per rank",
        "stream: data in update 0",
        (
            "order[RANK::WORLD_SIZE]",
            "order[RANK * len(order) // WORLD_SIZE : (RANK + 1) * len(order) // WORLD_SIZE]",
        ),
    ),
    mutant(
        "a stream shuffled with a seed per rank",
        "stream: data in update 0",
        ("manual_seed(self.epoch)", "manual_seed(self.epoch + 100 * RANK)"),
    ),
    mutant(
        "a stream without a new order in each epoch",
        "stream: data in update 4",
        ("readings.epoch = epoch", "readings.epoch = 0"),
        against="correct",
    ),
    mutant(
        "the Accelerator's loader declared unsharded, which it is not meant to be",
        "accelerated: data in update 0",
        (
            "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)",
            "model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)\n"
            "    accelerator.allow_unsharded(loader)",
        ),
        ("        loader.set_epoch(epoch)\n", ""),
    ),
    mutant(
        "the Trainer's dataset already cut by the script",
        "trainer: data in update 0",
        (
            "train_dataset=make_texts()",
            'train_dataset=make_texts(80)[int(__import__("os").environ.get("RANK", 0)) :: 2]',
        ),
    ),
    mutant(
        "the Trainer's dataset shuffled with a seed per rank",
        "trainer: data in update 0",
        (
            "train_dataset=make_texts()",
            'train_dataset=__import__("random").Random(int(__import__("os").environ.get("RANK", 0))).sample(make_texts(), 40)',
        ),
    ),
    mutant(
        "equal dropout masks on all ranks",
        "raw_ddp: rng in update 0",
        ("torch.manual_seed(100 + RANK)", "torch.manual_seed(100)"),
    ),
    mutant(
        "equal dropout masks on all ranks, Accelerator",
        "accelerated: rng in update 0",
        ("torch.manual_seed(100 + accelerator.process_index)", "torch.manual_seed(100)"),
    ),
    mutant(
        "equal dropout masks on all ranks, fsdp2",
        "language_model: rng in update 0",
        ("torch.manual_seed(100 + accelerator.process_index)", "torch.manual_seed(100)"),
        engine="fsdp2",
    ),
    mutant(
        "ranks seeded anew, and alike, in each epoch",
        "resume_loop: rng in update 0",
        (
            "        sampler.set_epoch(epoch)\n",
            "        sampler.set_epoch(epoch)\n        torch.manual_seed(epoch)\n",
        ),
    ),
    mutant(
        "the same dropout masks in each step",
        "resume_loop: rng in update 1",
        (
            "            optimizer.zero_grad()\n",
            "            optimizer.zero_grad()\n            torch.manual_seed(100 + RANK)\n",
        ),
        against="correct",
    ),
    mutant(
        "batch norm per rank",
        "raw_ddp: forward in update 0",
        ("self.norm = GlobalBatchNorm(16)", "self.norm = nn.BatchNorm1d(16)"),
        tensors="norm",
    ),
    mutant(
        "inputs normalized per rank",
        "raw_ddp: forward in update 0",
        ("loss = F.cross_entropy(model(x), y)", "loss = F.cross_entropy(model((x - x.mean(0)) / x.std(0)), y)"),
        tensors="first",
    ),
    mutant(
        "inputs scaled on one rank",
        "raw_ddp: forward in update 0",
        ("model(x)", "model(x * (1 + 0.1 * RANK))"),
        tensors="first",
    ),
    mutant(
        "padding leaks into the outputs",
        "language_model: forward in update 0",
        ("return self.head(x + self", "x = x + x.mean(dim=1, keepdim=True)\n        return self.head(x + self"),
        tensors="mix",
    ),
    mutant(
        "the model left in eval mode after an evaluation",
        "resume_loop: forward or buffers in update 4",
        (
            "        done = update % per_epoch\n",
            "        done = update % per_epoch\n        net.train(epoch == 0)\n",
        ),
        against="correct",
        tensors="*",
    ),
    mutant(
        "one rank in eval mode",
        "resume_loop: forward or buffers in update 0",
        (
            "        done = update % per_epoch\n",
            "        done = update % per_epoch\n        net.train(RANK == 0)\n",
        ),
        tensors="*",
    ),
    mutant(
        "labels in the wrong order on one rank",
        "raw_ddp: loss weight or backward in update 0",
        ("model(x), y)", "model(x), y.roll(RANK))"),
        tensors="*",
    ),
)
