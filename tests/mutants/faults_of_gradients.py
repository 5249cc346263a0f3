"""Faults in what a loss is averaged over, in the reduction of gradients, and in clipping."""

from __future__ import annotations

from tests.mutants.mutant import CUT_TEXTS, REDUCED_WHEN_CLIPPED, Mutant

__all__ = ["MUTANTS"]

_RAW = "raw_ddp"
_SYNC = "with nullcontext() if is_last or WORLD_SIZE == 1 else model.no_sync():"
_NO_SYNC = "with nullcontext() if WORLD_SIZE == 1 else model.no_sync():"
_CLIP = "                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n"
_STEP = "                optimizer.step()\n"
_DDP = "model = DistributedDataParallel(net) if WORLD_SIZE > 1 else net"


def _by_hand(reduce: str, *, after_clip: bool = False) -> tuple[tuple[str, str], ...]:
    """Edits that replace DistributedDataParallel's reduction by statements for each parameter ``p``."""
    loop = f"                for p in model.parameters() if WORLD_SIZE > 1 else []:\n                    {reduce}\n"
    return (_SYNC, _NO_SYNC), (_CLIP, _CLIP + loop if after_clip else loop + _CLIP)


def _hook(body: str) -> tuple[tuple[str, str], ...]:
    """Edits that register a communication hook with this body, in which ``reduced`` is a future of the sum."""
    return (
        (
            "def make_data(",
            "def reduce_bucket(_, bucket):\n"
            "    reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n"
            f"    return {body}\n\n\ndef make_data(",
        ),
        (_DDP, f"{_DDP}\n    if WORLD_SIZE > 1:\n        model.register_comm_hook(None, reduce_bucket)"),
    )


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="loss divided by the ranks, which DDP does again",
        script=_RAW,
        edits=(("(loss / window).backward()", "(loss / window / WORLD_SIZE).backward()"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="loss multiplied by the ranks (scaled by the tensor-parallel size)",
        script=_RAW,
        edits=(("(loss / window).backward()", "(loss / window * WORLD_SIZE).backward()"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="loss not divided by the micro-steps",
        script=_RAW,
        edits=(("(loss / window).backward()", "loss.backward()"),),
        against="correct",
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="last window divided by the full count",
        script=_RAW,
        edits=(("(loss / window)", "(loss / ACCUMULATION)"),),
        against="correct",
        update=2,
        stages=("loss weight",),
    ),
    Mutant(
        name="loss divided by the micro-steps twice, Accelerator",
        script="accelerated",
        edits=(("accelerator.backward(loss)", "accelerator.backward(loss / ACCUMULATION)"),),
        against="correct",
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="loss.backward() in place of accelerator.backward(loss)",
        script="accelerated",
        edits=(("accelerator.backward(loss)", "loss.backward()"),),
        against="correct",
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="weighted loss averaged per rank",
        script="level1",
        edits=(("/ total * world.world_size", "/ weights.sum()"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="weighted loss without the factor of the ranks",
        script="level1",
        edits=(("/ total * world.world_size", "/ total"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="unequal last batches averaged per rank",
        script="stream",
        variant=(("count=24", "count=23"),),
        edits=(('F.mse_loss(model(x), y, reduction="sum") / total * WORLD_SIZE', "F.mse_loss(model(x), y)"),),
        update=3,
        stages=("loss weight",),
    ),
    Mutant(
        name="sum of losses divided by the rank's own count",
        script="stream",
        variant=(("count=24", "count=23"),),
        edits=(
            ("            if WORLD_SIZE > 1:\n                dist.all_reduce(total)\n", ""),
            ("/ total * WORLD_SIZE", "/ total"),
        ),
        update=3,
        stages=("loss weight",),
    ),
    Mutant(
        name="token loss averaged per rank: no num_items=",
        script="language_model",
        edits=((", num_items=(labels != IGNORED).sum())", ")"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="token loss averaged per rank: no num_items=, texts that the batch cuts",
        script="language_model",
        variant=CUT_TEXTS,
        edits=((", num_items=(labels != IGNORED).sum())", ")"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="token loss averaged per rank: no num_items=, fsdp2",
        script="language_model",
        engine="fsdp2",
        edits=((", num_items=(labels != IGNORED).sum())", ")"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="padding counted as items",
        script="language_model",
        edits=(("num_items=(labels != IGNORED).sum()", "num_items=labels.numel()"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="num_items already summed over the ranks",
        script="language_model",
        edits=(("num_items=(labels != IGNORED).sum()", "num_items=accelerator.reduce((labels != IGNORED).sum())"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="number of texts passed as num_items",
        script="language_model",
        edits=(("num_items=(labels != IGNORED).sum()", "num_items=len(labels)"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="the Trainer's model ignores num_items_in_batch",
        script="trainer",
        edits=(('kwargs.get("num_items_in_batch", (labels != IGNORED).sum())', "(labels != IGNORED).sum()"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="average_tokens_across_devices=False",
        script="trainer",
        edits=(("            seed=5,\n", "            seed=5,\n            average_tokens_across_devices=False,\n"),),
        update=0,
        stages=("loss weight",),
    ),
    Mutant(
        name="a different loss scale on each rank",
        script="ema_scaler",
        edits=(("init_scale=1024.0", "init_scale=1024.0 * (1 + RANK)"),),
        update=0,
        stages=("loss weight", "reduce"),
        tensors="*",
    ),
    Mutant(
        name="gradient of the head scaled by the tensor-parallel size",
        script=_RAW,
        edits=((_DDP, f"net.head.weight.register_hook(lambda gradient: gradient * WORLD_SIZE)\n    {_DDP}"),),
        update=0,
        stages=("backward",),
        tensors="head.weight",
    ),
    Mutant(
        name="optimizer step inside no_sync",
        script=_RAW,
        edits=((_SYNC, _NO_SYNC),),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="gradients synchronized in the first micro-step, not in the last",
        script=_RAW,
        edits=((_SYNC, "with nullcontext() if i == first or WORLD_SIZE == 1 else model.no_sync():"),),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="forward pass of the inner model, past DDP",
        script=_RAW,
        edits=(("model(x), y)", "net(x), y)"),),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="gradients summed over the ranks, not averaged",
        script=_RAW,
        edits=_hook("reduced.then(lambda f: f.value()[0])"),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="gradients averaged twice",
        script=_RAW,
        edits=_hook("reduced.then(lambda f: f.value()[0] / WORLD_SIZE**2)"),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="communication hook without communication",
        script=_RAW,
        edits=(
            (
                _DDP,
                f"{_DDP}\n    if WORLD_SIZE > 1:\n        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook\n"
                "        model.register_comm_hook(None, noop_hook)",
            ),
        ),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="gradients compressed to float16 by a communication hook",
        script=_RAW,
        edits=(
            (
                _DDP,
                f"{_DDP}\n    if WORLD_SIZE > 1:\n        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import "
                "fp16_compress_hook\n        model.register_comm_hook(None, fp16_compress_hook)",
            ),
        ),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="all_reduce by hand, without the division",
        script=_RAW,
        edits=_by_hand("dist.all_reduce(p.grad)"),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="reduce by hand to rank 0 only",
        script=_RAW,
        edits=_by_hand("dist.reduce(p.grad.div_(WORLD_SIZE), 0)"),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="all_reduce by hand, without the biases",
        script=_RAW,
        edits=_by_hand("dist.all_reduce(p.grad.div_(WORLD_SIZE)) if p.ndim > 1 else None"),
        update=0,
        stages=("reduce",),
        tensors="*.bias",
    ),
    Mutant(
        name="all_reduce by hand in bfloat16",
        script=_RAW,
        edits=_by_hand("half = p.grad.bfloat16(); dist.all_reduce(half); p.grad.copy_(half / WORLD_SIZE)"),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="gradients of rank 0 broadcast",
        script=_RAW,
        edits=_by_hand("dist.broadcast(p.grad, 0)"),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="weights averaged after the step in place of gradients before it",
        script=_RAW,
        edits=(
            (_SYNC, _NO_SYNC),
            (
                "                schedule.step()\n",
                "                schedule.step()\n                for p in model.parameters() if WORLD_SIZE > 1 else []:\n"
                "                    dist.all_reduce(p.data.div_(WORLD_SIZE))\n",
            ),
        ),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="a parameter that DDP ignores",
        script=_RAW,
        edits=(
            (
                _DDP,
                'DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["head.bias"])\n    ' + _DDP,
            ),
        ),
        update=0,
        stages=("reduce",),
        tensors="head.bias",
    ),
    Mutant(
        name="a layer unfrozen after DDP was built",
        script=_RAW,
        edits=((_DDP, f"net.head.weight.requires_grad_(False)\n    {_DDP}\n    net.head.weight.requires_grad_(True)"),),
        update=0,
        stages=("reduce",),
        tensors="head.weight",
    ),
    Mutant(
        name="a new head after DDP was built",
        script=_RAW,
        variant=((_DDP, f"net.head = nn.Linear(16, 4)\n    {_DDP}"),),
        edits=(
            (
                f"net.head = nn.Linear(16, 4)\n    {_DDP}",
                _DDP.replace("(net)", "(net, find_unused_parameters=True)") + "\n    net.head = nn.Linear(16, 4)",
            ),
        ),
        update=0,
        stages=("reduce",),
        tensors="head.*",
    ),
    Mutant(
        name="gradients not cleared between updates",
        script=_RAW,
        edits=(("                optimizer.zero_grad()\n", ""),),
        against="correct",
        update=1,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="gradients cleared in each micro-step",
        script="fsdp_loop",
        edits=(
            (
                "            if is_last:\n",
                "            if not is_last:\n                optimizer.zero_grad()\n            if is_last:\n",
            ),
            ("model.set_requires_gradient_sync(is_last)", "model.set_requires_gradient_sync(True)"),
        ),
        against="correct",
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="fully_shard sums gradients in place of averaging them",
        script="fsdp_loop",
        edits=(
            (
                "        fully_shard(model)\n",
                "        fully_shard(model)\n        for one in (*model.blocks, model):\n            one.set_force_sum_reduction_for_comms(True)\n            one.set_gradient_divide_factor(1.0)\n",
            ),
        ),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="one block of fully_shard with another divisor",
        script="fsdp_loop",
        edits=(
            (
                "        fully_shard(model)\n",
                "        fully_shard(model)\n        model.blocks[1].set_force_sum_reduction_for_comms(True)\n        model.blocks[1].set_gradient_divide_factor(1.0)\n",
            ),
        ),
        update=0,
        stages=("reduce",),
        tensors="blocks.1.*",
    ),
    Mutant(
        name="fully_shard reduces in bfloat16",
        script="fsdp_loop",
        edits=(
            (
                "from torch.distributed.fsdp import fully_shard",
                "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
            ),
            (
                "        fully_shard(model)\n",
                "        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))\n",
            ),
        ),
        update=0,
        stages=("reduce",),
        tensors="*",
    ),
    Mutant(
        name="a parameter that fully_shard ignores",
        script="fsdp_loop",
        variant=(("                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n", ""),),
        edits=(("        fully_shard(model)\n", "        fully_shard(model, ignored_params={model.scale})\n"),),
        update=0,
        stages=("reduce",),
        tensors="scale",
    ),
    Mutant(
        name="weights computed in bfloat16 on ranks only",
        script="fsdp_loop",
        edits=(
            (
                "from torch.distributed.fsdp import fully_shard",
                "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
            ),
            (
                "            fully_shard(block)\n",
                "            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))\n",
            ),
        ),
        update=0,
        stages=("forward",),
        tensors="blocks.0",
    ),
    Mutant(
        name="tied weights split on the ranks",
        script="language_model",
        edits=(
            (
                "    model = LanguageModel()\n",
                "    model = LanguageModel()\n    if accelerator.num_processes > 1:\n"
                "        model.head.weight = nn.Parameter(model.head.weight.detach().clone())\n",
            ),
        ),
        update=0,
        stages=("backward", "initial weights"),
        tensors="*",
    ),
    Mutant(
        name="tied weights split on the ranks, fsdp2",
        script="language_model",
        engine="fsdp2",
        edits=(
            (
                "    model = LanguageModel()\n",
                "    model = LanguageModel()\n    if accelerator.num_processes > 1:\n"
                "        model.head.weight = nn.Parameter(model.head.weight.detach().clone())\n",
            ),
        ),
        update=0,
        stages=("backward", "initial weights", "reduce"),
        tensors="*",
    ),
    Mutant(
        name="gradients clipped before they are reduced",
        script=_RAW,
        edits=_by_hand("dist.all_reduce(p.grad.div_(WORLD_SIZE))", after_clip=True),
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="gradients clipped in each micro-step",
        script=_RAW,
        edits=((_CLIP, ""), ("            if is_last:\n", _CLIP[4:] + "            if is_last:\n")),
        against="correct",
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="gradients clipped on rank 0 only",
        script=_RAW,
        edits=((_CLIP, f"                if RANK == 0:\n    {_CLIP}"),),
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="max_norm multiplied by the ranks",
        script=_RAW,
        edits=(("parameters(), MAX_NORM)", "parameters(), MAX_NORM * WORLD_SIZE)"),),
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="gradients clipped after the step",
        script=_RAW,
        edits=((_CLIP + _STEP, _STEP + _CLIP),),
        against="correct",
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="only the head clipped",
        script=_RAW,
        edits=((_CLIP, _CLIP.replace("model", "net.head")),),
        against="correct",
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="another max_norm on each rank, where clipping reduces the gradients",
        script="accelerated",
        variant=REDUCED_WHEN_CLIPPED,
        edits=(("parameters(), MAX_NORM)", "parameters(), MAX_NORM * (1 + accelerator.process_index))"),),
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="gradients clipped while the loss scale is still in them",
        script="ema_scaler",
        edits=(("            scaler.unscale_(optimizer)\n", ""),),
        against="correct",
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="norm of the rank's shards, fully_shard",
        script="fsdp_loop",
        edits=(
            (
                "nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)",
                "shards = [torch.nn.Parameter(getattr(p, '_local_tensor', p.data)) for p in model.parameters()]\n"
                "                for shard, p in zip(shards, model.parameters(), strict=True):\n"
                "                    shard.grad = getattr(p.grad, '_local_tensor', p.grad)\n"
                "                nn.utils.clip_grad_norm_(shards, MAX_NORM)",
            ),
        ),
        update=0,
        stages=("clip",),
        tensors="*",
    ),
    Mutant(
        name="values clipped to a bound divided by the ranks",
        script="stream",
        edits=(("parameters(), 0.2)", "parameters(), 0.2 / WORLD_SIZE)"),),
        update=0,
        stages=("clip",),
        tensors="*",
    ),
)
