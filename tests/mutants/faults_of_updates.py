"""Faults in windows of micro-steps, learning rates, optimizers, buffers and averages of weights."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

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
    Mutant(
        name="accumulation counted over epochs",
        script=_RAW,
        edits=((_IS_LAST, "is_last = (epoch * len(loader) + i + 1) % ACCUMULATION == 0"),),
        against="correct",
        update=2,
        stages=("data",),
    ),
    Mutant(
        name="last window of an epoch left to the next epoch",
        script=_RAW,
        edits=((_IS_LAST, "is_last = (i + 1) % ACCUMULATION == 0"),),
        against="correct",
        update=2,
        stages=("data",),
    ),
    Mutant(
        name="last window of an epoch thrown away",
        script=_RAW,
        edits=(
            (_IS_LAST, "is_last = (i + 1) % ACCUMULATION == 0"),
            ("        sampler.set_epoch(epoch)\n", "        sampler.set_epoch(epoch)\n        optimizer.zero_grad()\n"),
        ),
        against="correct",
        update=2,
        stages=("data",),
    ),
    Mutant(
        name="learning rate multiplied by the ranks",
        script=_RAW,
        edits=(("lr=0.1,", "lr=0.1 * WORLD_SIZE,"),),
        update=0,
        stages=("scheduler",),
    ),
    Mutant(
        name="another learning rate on one rank",
        script=_RAW,
        edits=(("lr=0.1,", "lr=0.1 - 0.01 * RANK,"),),
        update=0,
        stages=("scheduler",),
    ),
    Mutant(
        name="scheduler stepped num_processes times",
        script=_RAW,
        edits=(
            (
                "                schedule.step()\n",
                "                for _ in range(WORLD_SIZE):\n                    schedule.step()\n",
            ),
        ),
        update=1,
        stages=("scheduler",),
        effect="lr",
    ),
    Mutant(
        name="scheduler stepped num_processes times by the Accelerator",
        script="accelerated",
        edits=(("step_scheduler_with_optimizer=False", "step_scheduler_with_optimizer=True"),),
        against="correct",
        update=1,
        stages=("scheduler",),
        effect="lr",
    ),
    Mutant(
        name="scheduler stepped num_processes times, zero1",
        script="language_model",
        engine="zero1",
        edits=(("step_scheduler_with_optimizer=False", "step_scheduler_with_optimizer=True"),),
        against="correct",
        update=1,
        stages=("scheduler",),
        effect="lr",
    ),
    Mutant(
        name="scheduler stepped in each micro-step",
        script=_RAW,
        edits=(
            ("                schedule.step()\n", ""),
            (
                "            if is_last:\n",
                "            if not is_last:\n                schedule.step()\n            if is_last:\n",
            ),
        ),
        against="correct",
        update=0,
        stages=("scheduler",),
        effect="*",
    ),
    Mutant(
        name="scheduler stepped on rank 0 only",
        script=_RAW,
        edits=(
            (
                "                schedule.step()\n",
                "                if RANK == 0:\n                    schedule.step()\n",
            ),
        ),
        update=1,
        stages=("scheduler",),
    ),
    Mutant(
        name="scheduler stepped once per epoch",
        script=_RAW,
        edits=(
            (
                "                schedule.step()\n",
                "                if i == len(loader) - 1:\n                    schedule.step()\n",
            ),
        ),
        against="correct",
        update=1,
        stages=("scheduler",),
        effect="lr",
    ),
    Mutant(
        name="length of the schedule divided by the ranks",
        script="language_model",
        edits=(("total_iters=12", "total_iters=12 // accelerator.num_processes"),),
        update=1,
        stages=("scheduler",),
        effect="lr",
    ),
    Mutant(
        name="rates from each rank's own evaluation",
        script="level1",
        edits=(('            sums = reduce(sums, "sum")\n', ""),),
        update=6,
        stages=("scheduler",),
    ),
    Mutant(
        name="evaluation counts the repeated samples",
        script="level1",
        edits=(
            (
                "shard(DataLoader(make_data(3, 13), batch_size=BATCH_SIZE))\n",
                "DataLoader(test_data := make_data(3, 13), batch_size=BATCH_SIZE, "
                "sampler=torch.utils.data.DistributedSampler(test_data, world.world_size, world.rank, shuffle=False))\n",
            ),
        ),
        update=6,
        stages=("scheduler",),
    ),
    Mutant(
        name="evaluation averages the ranks' means",
        script="level1",
        edits=(
            (
                'sums = reduce(sums, "sum")',
                'sums = torch.stack([reduce(sums[0] / sums[1], "mean"), torch.tensor(1.0)])',
            ),
        ),
        update=6,
        stages=("scheduler",),
    ),
    Mutant(
        name="a callback of the Trainer steps the schedule again",
        script="trainer",
        edits=(
            (
                "    def on_step_end(self, args, state, control, model=None, **kwargs):\n",
                "    def on_step_end(self, args, state, control, model=None, **kwargs):\n"
                "        for _ in range(args.world_size - 1):\n            kwargs['lr_scheduler'].step()\n",
            ),
        ),
        update=1,
        stages=("scheduler",),
    ),
    Mutant(
        name="another momentum on one rank",
        script=_RAW,
        edits=(("momentum=0.9,", "momentum=0.9 - 0.1 * RANK,"),),
        update=1,
        stages=("optimizer",),
        tensors="*",
    ),
    Mutant(
        name="weight decay divided by the ranks",
        script=_RAW,
        edits=(("weight_decay=0.01", "weight_decay=0.01 / WORLD_SIZE"),),
        update=0,
        stages=("optimizer",),
        tensors="*",
    ),
    Mutant(
        name="weight decay on all parameters",
        script="level1",
        edits=(('"weight_decay": 0.0', '"weight_decay": 0.1'),),
        against="correct",
        update=0,
        stages=("optimizer",),
        tensors="*",
    ),
    Mutant(
        name="beta1 chosen from the world size",
        script="fsdp_loop",
        edits=(("lr=0.02,", "lr=0.02, betas=(0.9 if WORLD_SIZE == 1 else 0.8, 0.999),"),),
        update=0,
        stages=("optimizer",),
        tensors="*",
    ),
    Mutant(
        name="the optimizer steps on rank 0 only",
        script=_RAW,
        edits=(
            (
                "                optimizer.step()\n",
                "                if RANK == 0:\n                    optimizer.step()\n",
            ),
        ),
        update=0,
        stages=("optimizer",),
        tensors="*",
    ),
    Mutant(
        name="the optimizer of a copy of the model",
        script="fsdp_loop",
        edits=(
            (
                "    optimizer = torch.optim.AdamW(model.parameters()",
                "    if WORLD_SIZE > 1:\n        optimized = [nn.Parameter(p.detach().clone()) for p in model.parameters()]\n"
                "    else:\n        optimized = model.parameters()\n    optimizer = torch.optim.AdamW(optimized",
            ),
        ),
        update=0,
        stages=("optimizer",),
        tensors="*",
    ),
    Mutant(
        name="a layer missing in the optimizer",
        script=_RAW,
        edits=(
            ("torch.optim.SGD(model.parameters()", "torch.optim.SGD([*net.first.parameters(), *net.norm.parameters()]"),
        ),
        against="correct",
        update=0,
        stages=("optimizer",),
        tensors="head.*",
    ),
    Mutant(
        name="groups of the optimizer with each other's rates",
        script="level1",
        edits=(
            ('"initial_lr": 0.01}', '"initial_lr": 0.02, "lr": 0.02}'),
            ('"lr": 0.02, "initial_lr": 0.02}', '"initial_lr": 0.01}'),
        ),
        against="correct",
        update=0,
        stages=("scheduler",),
    ),
    Mutant(
        name="a weight changed by hand on one rank",
        script=_RAW,
        edits=(
            (
                "                schedule.step()\n",
                "                schedule.step()\n                if RANK == 1 and epoch == 1:\n"
                "                    net.head.bias.data.mul_(0.9)\n",
            ),
        ),
        update=3,
        stages=("optimizer",),
        tensors="head.bias",
    ),
    Mutant(
        name="an overflow skipped on one rank only",
        script="ema_scaler",
        edits=(
            (
                "            scaler.unscale_(optimizer)\n",
                "            if RANK == 1:\n                for p in model.parameters():\n"
                "                    torch.nan_to_num_(p.grad, 0.0, 0.0, 0.0)\n            scaler.unscale_(optimizer)\n",
            ),
        ),
        update=2,
        stages=("optimizer", "reduce"),
        tensors="*",
    ),
    Mutant(
        name="initial weights drawn with a seed per rank",
        script="fsdp_loop",
        edits=(("torch.manual_seed(0)", "torch.manual_seed(RANK)"),),
        update=-1,
        stages=("initial weights",),
        tensors="*",
    ),
    Mutant(
        name="initial weights not sent to the ranks",
        script=_RAW,
        edits=(
            ("torch.manual_seed(0)", "torch.manual_seed(RANK)"),
            (_DDP, _DDP.replace("(net)", "(net, init_sync=False)")),
        ),
        update=-1,
        stages=("initial weights",),
        tensors="*",
    ),
    Mutant(
        name="one rank starts from other weights",
        script=_RAW,
        edits=((_DDP, f"{_DDP}\n    if RANK == 1:\n        net.head.weight.data.mul_(1.1)"),),
        update=-1,
        stages=("initial weights",),
        tensors="head.weight",
    ),
    Mutant(
        name="running statistics of each rank's own batches",
        script=_RAW,
        edits=(("self.running_mean.lerp_(mean, self.momentum)", "self.running_mean.lerp_(x.mean(0), self.momentum)"),),
        update=0,
        stages=("buffers",),
        tensors="norm.running_mean",
    ),
    Mutant(
        name="running variance corrected with the rank's count",
        script=_RAW,
        edits=(("var * count / (count - 1)", "var * len(x) / (len(x) - 1)"),),
        update=0,
        stages=("buffers",),
        tensors="norm.running_var",
    ),
    Mutant(
        name="an evaluation in training mode changes the running statistics",
        script=_RAW,
        edits=(
            (
                "        sampler.set_epoch(epoch)\n",
                "        if epoch:\n            with torch.no_grad():\n                net(data[:8][0])\n"
                "        sampler.set_epoch(epoch)\n",
            ),
        ),
        against="correct",
        update=3,
        stages=("buffers",),
        tensors="norm.*",
    ),
    Mutant(
        name="average of the weights taken before the step",
        script="ema_scaler",
        edits=((_EMA, ""), ("            scaler.step(optimizer)\n", _EMA + "            scaler.step(optimizer)\n")),
        against="correct",
        update=0,
        stages=("optimizer", "buffers"),
        tensors="*",
    ),
    Mutant(
        name="average of the weights kept on rank 0 only",
        script="ema_scaler",
        edits=((_EMA, _EMA.replace("with torch.no_grad():", "if RANK == 0:\n             with torch.no_grad():")),),
        update=0,
        stages=("optimizer", "buffers"),
        tensors="*",
    ),
    Mutant(
        name="a frozen teacher inside the model averaged on rank 0 only",
        script="ema_scaler",
        variant=_TEACHER_INSIDE,
        edits=(
            (
                _EMA_INSIDE,
                _EMA_INSIDE.replace("with torch.no_grad():", "if RANK == 0:\n             with torch.no_grad():"),
            ),
        ),
        update=0,
        stages=("optimizer", "buffers"),
        tensors="teacher.*",
    ),
    Mutant(
        name="a frozen teacher inside the model averaged with a decay to the power of the ranks",
        script="ema_scaler",
        variant=_TEACHER_INSIDE,
        edits=(("1 - DECAY)", "1 - DECAY**WORLD_SIZE)"),),
        update=0,
        stages=("optimizer", "buffers"),
        tensors="teacher.*",
    ),
    Mutant(
        name="the second replica of a hybrid sharding drifts",
        script="fsdp_loop",
        variant=_HYBRID,
        world_size=4,
        edits=(
            (
                "                optimizer.step()\n",
                "                optimizer.step()\n                if RANK > 1:\n                    with torch.no_grad():\n"
                "                        model.head.weight.mul_(1.01)\n",
            ),
        ),
        update=0,
        stages=("optimizer",),
        tensors="head.weight",
    ),
    Mutant(
        name="decay of the average taken to the power of the ranks",
        script="ema_scaler",
        edits=(("1 - DECAY)", "1 - DECAY**WORLD_SIZE)"),),
        update=0,
        stages=("optimizer", "buffers"),
        tensors="*",
    ),
)
