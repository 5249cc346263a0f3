"""Faults in windows of micro-steps, learning rates, optimizers, buffers and averages of weights."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

_RAW = "raw_ddp"
_IS_LAST = "is_last = i == first + window - 1"
_DDP = "model = DistributedDataParallel(net) if WORLD_SIZE > 1 else net"
_EMA = """            with torch.no_grad():
                for average, weight in zip(teacher.parameters(), student.parameters(), strict=True):
                    average.lerp_(weight, 1 - DECAY)
"""
_EMA_INSIDE = _EMA.replace("strict=True", "strict=False")
_TEACHER_INSIDE = (
    ("teacher = copy.deepcopy(student)", "teacher = student.teacher = copy.deepcopy(student)"),
    (_EMA, _EMA_INSIDE),  # the first of student.parameters() are its own
)
_HYBRID = (
    (
        "        for block in model.blocks:\n",
        '        mesh = dist.init_device_mesh("cpu", (2, WORLD_SIZE // 2), mesh_dim_names=("replicate", "shard"))\n'
        "        for block in model.blocks:\n",
    ),
    ("fully_shard(block)", "fully_shard(block, mesh=mesh)"),
    ("fully_shard(model)", "fully_shard(model, mesh=mesh)"),
)

MUTANTS: tuple[Mutant, ...] = (
    mutant(
        "accumulation counted over epochs",
        "raw_ddp: data in update 2",
        (_IS_LAST, "is_last = (epoch * len(loader) + i + 1) % ACCUMULATION == 0"),
        against="correct",
    ),
    mutant(
        "last window of an epoch left to the next epoch",
        "raw_ddp: data in update 2",
        (_IS_LAST, "is_last = (i + 1) % ACCUMULATION == 0"),
        against="correct",
    ),
    mutant(
        "last window of an epoch thrown away",
        "raw_ddp: data in update 2",
        (_IS_LAST, "is_last = (i + 1) % ACCUMULATION == 0"),
        ("        sampler.set_epoch(epoch)\n", "        sampler.set_epoch(epoch)\n        optimizer.zero_grad()\n"),
        against="correct",
    ),
    mutant(
        "learning rate multiplied by the ranks", "raw_ddp: scheduler in update 0", ("lr=0.1,", "lr=0.1 * WORLD_SIZE,")
    ),
    mutant("another learning rate on one rank", "raw_ddp: scheduler in update 0", ("lr=0.1,", "lr=0.1 - 0.01 * RANK,")),
    mutant(
        "scheduler stepped num_processes times",
        "raw_ddp: scheduler in update 1",
        (
            "                schedule.step()\n",
            "                for _ in range(WORLD_SIZE):\n                    schedule.step()\n",
        ),
        effect="lr",
    ),
    mutant(
        "scheduler stepped num_processes times by the Accelerator",
        "accelerated: scheduler in update 1",
        ("step_scheduler_with_optimizer=False", "step_scheduler_with_optimizer=True"),
        against="correct",
        effect="lr",
    ),
    mutant(
        "scheduler stepped num_processes times, zero1",
        "language_model: scheduler in update 1",
        ("step_scheduler_with_optimizer=False", "step_scheduler_with_optimizer=True"),
        engine="zero1",
        against="correct",
        effect="lr",
    ),
    mutant(
        "scheduler stepped in each micro-step",
        "raw_ddp: scheduler in update 0",
        ("                schedule.step()\n", ""),
        (
            "            if is_last:\n",
            "            if not is_last:\n                schedule.step()\n            if is_last:\n",
        ),
        against="correct",
        effect="*",
    ),
    mutant(
        "scheduler stepped on rank 0 only",
        "raw_ddp: scheduler in update 1",
        (
            "                schedule.step()\n",
            "                if RANK == 0:\n                    schedule.step()\n",
        ),
    ),
    mutant(
        "scheduler stepped once per epoch",
        "raw_ddp: scheduler in update 1",
        (
            "                schedule.step()\n",
            "                if i == len(loader) - 1:\n                    schedule.step()\n",
        ),
        against="correct",
        effect="lr",
    ),
    mutant(
        "length of the schedule divided by the ranks",
        "language_model: scheduler in update 1",
        ("total_iters=12", "total_iters=12 // accelerator.num_processes"),
        effect="lr",
    ),
    mutant(
        "rates from each rank's own evaluation",
        "level1: scheduler in update 6",
        ('            sums = reduce(sums, "sum")\n', ""),
    ),
    mutant(
        "evaluation counts the repeated samples",
        "level1: scheduler in update 6",
        (
            "shard(DataLoader(make_data(3, 13), batch_size=BATCH_SIZE))\n",
            "DataLoader(test_data := make_data(3, 13), batch_size=BATCH_SIZE, "
            "sampler=torch.utils.data.DistributedSampler(test_data, world.world_size, world.rank, shuffle=False))\n",
        ),
    ),
    mutant(
        "evaluation averages the ranks' means",
        "level1: scheduler in update 6",
        (
            'sums = reduce(sums, "sum")',
            'sums = torch.stack([reduce(sums[0] / sums[1], "mean"), torch.tensor(1.0)])',
        ),
    ),
    mutant(
        "a callback of the Trainer steps the schedule again",
        "trainer: scheduler in update 1",
        (
            "    def on_step_end(self, args, state, control, model=None, **kwargs):\n",
            "    def on_step_end(self, args, state, control, model=None, **kwargs):\n"
            "        for _ in range(args.world_size - 1):\n            kwargs['lr_scheduler'].step()\n",
        ),
    ),
    mutant(
        "another momentum on one rank",
        "raw_ddp: optimizer in update 1",
        ("momentum=0.9,", "momentum=0.9 - 0.1 * RANK,"),
        tensors="*",
    ),
    mutant(
        "weight decay divided by the ranks",
        "raw_ddp: optimizer in update 0",
        ("weight_decay=0.01", "weight_decay=0.01 / WORLD_SIZE"),
        tensors="*",
    ),
    mutant(
        "weight decay on all parameters",
        "level1: optimizer in update 0",
        ('"weight_decay": 0.0', '"weight_decay": 0.1'),
        against="correct",
        tensors="*",
    ),
    mutant(
        "beta1 chosen from the world size",
        "fsdp_loop: optimizer in update 0",
        ("lr=0.02,", "lr=0.02, betas=(0.9 if WORLD_SIZE == 1 else 0.8, 0.999),"),
        tensors="*",
    ),
    mutant(
        "the optimizer steps on rank 0 only",
        "raw_ddp: optimizer in update 0",
        (
            "                optimizer.step()\n",
            "                if RANK == 0:\n                    optimizer.step()\n",
        ),
        tensors="*",
    ),
    mutant(
        "the optimizer of a copy of the model",
        "fsdp_loop: optimizer in update 0",
        (
            "    optimizer = torch.optim.AdamW(model.parameters()",
            "    if WORLD_SIZE > 1:\n        optimized = [nn.Parameter(p.detach().clone()) for p in model.parameters()]\n"
            "    else:\n        optimized = model.parameters()\n    optimizer = torch.optim.AdamW(optimized",
        ),
        tensors="*",
    ),
    mutant(
        "a layer missing in the optimizer",
        "raw_ddp: optimizer in update 0",
        ("torch.optim.SGD(model.parameters()", "torch.optim.SGD([*net.first.parameters(), *net.norm.parameters()]"),
        against="correct",
        tensors="head.*",
    ),
    mutant(
        "groups of the optimizer with each other's rates",
        "level1: scheduler in update 0",
        ('"initial_lr": 0.01}', '"initial_lr": 0.02, "lr": 0.02}'),
        ('"lr": 0.02, "initial_lr": 0.02}', '"initial_lr": 0.01}'),
        against="correct",
    ),
    mutant(
        "a weight changed by hand on one rank",
        "raw_ddp: optimizer in update 3",
        (
            "                schedule.step()\n",
            "                schedule.step()\n                if RANK == 1 and epoch == 1:\n"
            "                    net.head.bias.data.mul_(0.9)\n",
        ),
        tensors="head.bias",
    ),
    mutant(
        "an overflow skipped on one rank only",
        "ema_scaler: optimizer or reduce in update 2",
        (
            "            scaler.unscale_(optimizer)\n",
            "            if RANK == 1:\n                for p in model.parameters():\n"
            "                    torch.nan_to_num_(p.grad, 0.0, 0.0, 0.0)\n            scaler.unscale_(optimizer)\n",
        ),
        tensors="*",
    ),
    mutant(
        "initial weights drawn with a seed per rank",
        "fsdp_loop: initial weights in update -1",
        ("torch.manual_seed(0)", "torch.manual_seed(RANK)"),
        tensors="*",
    ),
    mutant(
        "initial weights not sent to the ranks",
        "raw_ddp: initial weights in update -1",
        ("torch.manual_seed(0)", "torch.manual_seed(RANK)"),
        (_DDP, _DDP.replace("(net)", "(net, init_sync=False)")),
        tensors="*",
    ),
    mutant(
        "one rank starts from other weights",
        "raw_ddp: initial weights in update -1",
        (_DDP, f"{_DDP}\n    if RANK == 1:\n        net.head.weight.data.mul_(1.1)"),
        tensors="head.weight",
    ),
    mutant(
        "running statistics of each rank's own batches",
        "raw_ddp: buffers in update 0",
        ("self.running_mean.lerp_(mean, self.momentum)", "self.running_mean.lerp_(x.mean(0), self.momentum)"),
        tensors="norm.running_mean",
    ),
    mutant(
        "running variance corrected with the rank's count",
        "raw_ddp: buffers in update 0",
        ("var * count / (count - 1)", "var * len(x) / (len(x) - 1)"),
        tensors="norm.running_var",
    ),
    mutant(
        "an evaluation in training mode changes the running statistics",
        "raw_ddp: buffers in update 3",
        (
            "        sampler.set_epoch(epoch)\n",
            "        if epoch:\n            with torch.no_grad():\n                net(data[:8][0])\n"
            "        sampler.set_epoch(epoch)\n",
        ),
        against="correct",
        tensors="norm.*",
    ),
    mutant(
        "average of the weights taken before the step",
        "ema_scaler: optimizer or buffers in update 0",
        (_EMA, ""),
        ("            scaler.step(optimizer)\n", _EMA + "            scaler.step(optimizer)\n"),
        against="correct",
        tensors="*",
    ),
    mutant(
        "average of the weights kept on rank 0 only",
        "ema_scaler: optimizer or buffers in update 0",
        (_EMA, _EMA.replace("with torch.no_grad():", "if RANK == 0:\n             with torch.no_grad():")),
        tensors="*",
    ),
    mutant(
        "a frozen teacher inside the model averaged on rank 0 only",
        "ema_scaler: optimizer or buffers in update 0",
        (
            _EMA_INSIDE,
            _EMA_INSIDE.replace("with torch.no_grad():", "if RANK == 0:\n             with torch.no_grad():"),
        ),
        variant=_TEACHER_INSIDE,
        tensors="teacher.*",
    ),
    mutant(
        "a frozen teacher inside the model averaged with a decay to the power of the ranks",
        "ema_scaler: optimizer or buffers in update 0",
        ("1 - DECAY)", "1 - DECAY**WORLD_SIZE)"),
        variant=_TEACHER_INSIDE,
        tensors="teacher.*",
    ),
    mutant(
        "the second replica of a hybrid sharding drifts",
        "fsdp_loop: optimizer in update 0",
        (
            "                optimizer.step()\n",
            "                optimizer.step()\n                if RANK > 1:\n                    with torch.no_grad():\n"
            "                        model.head.weight.mul_(1.01)\n",
        ),
        variant=_HYBRID,
        world_size=4,
        tensors="head.weight",
    ),
    mutant(
        "decay of the average taken to the power of the ranks",
        "ema_scaler: optimizer or buffers in update 0",
        ("1 - DECAY)", "1 - DECAY**WORLD_SIZE)"),
        tensors="*",
    ),
)
