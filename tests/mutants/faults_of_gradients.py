"""Faults in what a loss is averaged over, in the reduction of gradients, and in clipping."""

from __future__ import annotations

from tests.mutants.mutant import CUT_TEXTS, REDUCED_WHEN_CLIPPED, Mutant, mutant

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
    mutant(
        "loss divided by the ranks, which DDP does again",
        "raw_ddp: loss weight in update 0",
        ("(loss / window).backward()", "(loss / window / WORLD_SIZE).backward()"),
    ),
    mutant(
        "loss multiplied by the ranks (scaled by the tensor-parallel size)",
        "raw_ddp: loss weight in update 0",
        ("(loss / window).backward()", "(loss / window * WORLD_SIZE).backward()"),
    ),
    mutant(
        "loss not divided by the micro-steps",
        "raw_ddp: loss weight in update 0",
        ("(loss / window).backward()", "loss.backward()"),
        against="correct",
    ),
    mutant(
        "last window divided by the full count",
        "raw_ddp: loss weight in update 2",
        ("(loss / window)", "(loss / ACCUMULATION)"),
        against="correct",
    ),
    mutant(
        "loss divided by the micro-steps twice, Accelerator",
        "accelerated: loss weight in update 0",
        ("accelerator.backward(loss)", "accelerator.backward(loss / ACCUMULATION)"),
        against="correct",
    ),
    mutant(
        "loss.backward() in place of accelerator.backward(loss)",
        "accelerated: loss weight in update 0",
        ("accelerator.backward(loss)", "loss.backward()"),
        against="correct",
    ),
    mutant(
        "weighted loss averaged per rank",
        "level1: loss weight in update 0",
        ("/ total * world.world_size", "/ weights.sum()"),
    ),
    mutant(
        "weighted loss without the factor of the ranks",
        "level1: loss weight in update 0",
        ("/ total * world.world_size", "/ total"),
    ),
    mutant(
        "unequal last batches averaged per rank",
        "stream: loss weight in update 3",
        ('F.mse_loss(model(x), y, reduction="sum") / total * WORLD_SIZE', "F.mse_loss(model(x), y)"),
        variant=(("count=24", "count=23"),),
    ),
    mutant(
        "sum of losses divided by the rank's own count",
        "stream: loss weight in update 3",
        ("            if WORLD_SIZE > 1:\n                dist.all_reduce(total)\n", ""),
        ("/ total * WORLD_SIZE", "/ total"),
        variant=(("count=24", "count=23"),),
    ),
    mutant(
        "token loss averaged per rank: no num_items=",
        "language_model: loss weight in update 0",
        (", num_items=(labels != IGNORED).sum())", ")"),
    ),
    mutant(
        "token loss averaged per rank: no num_items=, texts that the batch cuts",
        "language_model: loss weight in update 0",
        (", num_items=(labels != IGNORED).sum())", ")"),
        variant=CUT_TEXTS,
    ),
    mutant(
        "token loss averaged per rank: no num_items=, fsdp2",
        "language_model: loss weight in update 0",
        (", num_items=(labels != IGNORED).sum())", ")"),
        engine="fsdp2",
    ),
    mutant(
        "padding counted as items",
        "language_model: loss weight in update 0",
        ("num_items=(labels != IGNORED).sum()", "num_items=labels.numel()"),
    ),
    mutant(
        "num_items already summed over the ranks",
        "language_model: loss weight in update 0",
        ("num_items=(labels != IGNORED).sum()", "num_items=accelerator.reduce((labels != IGNORED).sum())"),
    ),
    mutant(
        "number of texts passed as num_items",
        "language_model: loss weight in update 0",
        ("num_items=(labels != IGNORED).sum()", "num_items=len(labels)"),
    ),
    mutant(
        "the Trainer's model ignores num_items_in_batch",
        "trainer: loss weight in update 0",
        ('kwargs.get("num_items_in_batch", (labels != IGNORED).sum())', "(labels != IGNORED).sum()"),
    ),
    mutant(
        "average_tokens_across_devices=False",
        "trainer: loss weight in update 0",
        ("            seed=5,\n", "            seed=5,\n            average_tokens_across_devices=False,\n"),
    ),
    mutant(
        "a different loss scale on each rank",
        "ema_scaler: loss weight or reduce in update 0",
        ("init_scale=1024.0", "init_scale=1024.0 * (1 + RANK)"),
        tensors="*",
    ),
    mutant(
        "gradient of the head scaled by the tensor-parallel size",
        "raw_ddp: backward in update 0",
        (_DDP, f"net.head.weight.register_hook(lambda gradient: gradient * WORLD_SIZE)\n    {_DDP}"),
        tensors="head.weight",
    ),
    mutant("optimizer step inside no_sync", "raw_ddp: reduce in update 0", (_SYNC, _NO_SYNC), tensors="*"),
    mutant(
        "gradients synchronized in the first micro-step, not in the last",
        "raw_ddp: reduce in update 0",
        (_SYNC, "with nullcontext() if i == first or WORLD_SIZE == 1 else model.no_sync():"),
        tensors="*",
    ),
    mutant(
        "forward pass of the inner model, past DDP",
        "raw_ddp: reduce in update 0",
        ("model(x), y)", "net(x), y)"),
        tensors="*",
    ),
    mutant(
        "gradients summed over the ranks, not averaged",
        "raw_ddp: reduce in update 0",
        *_hook("reduced.then(lambda f: f.value()[0])"),
        tensors="*",
    ),
    mutant(
        "gradients averaged twice",
        "raw_ddp: reduce in update 0",
        *_hook("reduced.then(lambda f: f.value()[0] / WORLD_SIZE**2)"),
        tensors="*",
    ),
    mutant(
        "communication hook without communication",
        "raw_ddp: reduce in update 0",
        (
            _DDP,
            f"{_DDP}\n    if WORLD_SIZE > 1:\n        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook\n"
            "        model.register_comm_hook(None, noop_hook)",
        ),
        tensors="*",
    ),
    mutant(
        "gradients compressed to float16 by a communication hook",
        "raw_ddp: reduce in update 0",
        (
            _DDP,
            f"{_DDP}\n    if WORLD_SIZE > 1:\n        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import "
            "fp16_compress_hook\n        model.register_comm_hook(None, fp16_compress_hook)",
        ),
        tensors="*",
    ),
    mutant(
        "all_reduce by hand, without the division",
        "raw_ddp: reduce in update 0",
        *_by_hand("dist.all_reduce(p.grad)"),
        tensors="*",
    ),
    mutant(
        "reduce by hand to rank 0 only",
        "raw_ddp: reduce in update 0",
        *_by_hand("dist.reduce(p.grad.div_(WORLD_SIZE), 0)"),
        tensors="*",
    ),
    mutant(
        "all_reduce by hand, without the biases",
        "raw_ddp: reduce in update 0",
        *_by_hand("dist.all_reduce(p.grad.div_(WORLD_SIZE)) if p.ndim > 1 else None"),
        tensors="*.bias",
    ),
    mutant(
        "all_reduce by hand in bfloat16",
        "raw_ddp: reduce in update 0",
        *_by_hand("half = p.grad.bfloat16(); dist.all_reduce(half); p.grad.copy_(half / WORLD_SIZE)"),
        tensors="*",
    ),
    mutant(
        "gradients of rank 0 broadcast",
        "raw_ddp: reduce in update 0",
        *_by_hand("dist.broadcast(p.grad, 0)"),
        tensors="*",
    ),
    mutant(
        "weights averaged after the step in place of gradients before it",
        "raw_ddp: reduce in update 0",
        (_SYNC, _NO_SYNC),
        (
            "                schedule.step()\n",
            "                schedule.step()\n                for p in model.parameters() if WORLD_SIZE > 1 else []:\n"
            "                    dist.all_reduce(p.data.div_(WORLD_SIZE))\n",
        ),
        tensors="*",
    ),
    mutant(
        "a parameter that DDP ignores",
        "raw_ddp: reduce in update 0",
        (
            _DDP,
            'DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["head.bias"])\n    ' + _DDP,
        ),
        tensors="head.bias",
    ),
    mutant(
        "a layer unfrozen after DDP was built",
        "raw_ddp: reduce in update 0",
        (_DDP, f"net.head.weight.requires_grad_(False)\n    {_DDP}\n    net.head.weight.requires_grad_(True)"),
        tensors="head.weight",
    ),
    mutant(
        "a new head after DDP was built",
        "raw_ddp: reduce in update 0",
        (
            f"net.head = nn.Linear(16, 4)\n    {_DDP}",
            _DDP.replace("(net)", "(net, find_unused_parameters=True)") + "\n    net.head = nn.Linear(16, 4)",
        ),
        variant=((_DDP, f"net.head = nn.Linear(16, 4)\n    {_DDP}"),),
        tensors="head.*",
    ),
    mutant(
        "gradients not cleared between updates",
        "raw_ddp: reduce in update 1",
        ("                optimizer.zero_grad()\n", ""),
        against="correct",
        tensors="*",
    ),
    mutant(
        "gradients cleared in each micro-step",
        "fsdp_loop: reduce in update 0",
        (
            "            if is_last:\n",
            "            if not is_last:\n                optimizer.zero_grad()\n            if is_last:\n",
        ),
        ("model.set_requires_gradient_sync(is_last)", "model.set_requires_gradient_sync(True)"),
        against="correct",
        tensors="*",
    ),
    mutant(
        "fully_shard sums gradients in place of averaging them",
        "fsdp_loop: reduce in update 0",
        (
            "        fully_shard(model)\n",
            "        fully_shard(model)\n        for one in (*model.blocks, model):\n            one.set_force_sum_reduction_for_comms(True)\n            one.set_gradient_divide_factor(1.0)\n",
        ),
        tensors="*",
    ),
    mutant(
        "one block of fully_shard with another divisor",
        "fsdp_loop: reduce in update 0",
        (
            "        fully_shard(model)\n",
            "        fully_shard(model)\n        model.blocks[1].set_force_sum_reduction_for_comms(True)\n        model.blocks[1].set_gradient_divide_factor(1.0)\n",
        ),
        tensors="blocks.1.*",
    ),
    mutant(
        "fully_shard reduces in bfloat16",
        "fsdp_loop: reduce in update 0",
        (
            "from torch.distributed.fsdp import fully_shard",
            "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        ),
        (
            "        fully_shard(model)\n",
            "        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))\n",
        ),
        tensors="*",
    ),
    mutant(
        "a parameter that fully_shard ignores",
        "fsdp_loop: reduce in update 0",
        ("        fully_shard(model)\n", "        fully_shard(model, ignored_params={model.scale})\n"),
        variant=(("                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)\n", ""),),
        tensors="scale",
    ),
    mutant(
        "weights computed in bfloat16 on ranks only",
        "fsdp_loop: forward in update 0",
        (
            "from torch.distributed.fsdp import fully_shard",
            "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        ),
        (
            "            fully_shard(block)\n",
            "            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))\n",
        ),
        tensors="blocks.0",
    ),
    mutant(
        "tied weights split on the ranks",
        "language_model: backward or initial weights in update 0",
        (
            "    model = LanguageModel()\n",
            "    model = LanguageModel()\n    if accelerator.num_processes > 1:\n"
            "        model.head.weight = nn.Parameter(model.head.weight.detach().clone())\n",
        ),
        tensors="*",
    ),
    mutant(
        "tied weights split on the ranks, fsdp2",
        "language_model: backward or initial weights or reduce in update 0",
        (
            "    model = LanguageModel()\n",
            "    model = LanguageModel()\n    if accelerator.num_processes > 1:\n"
            "        model.head.weight = nn.Parameter(model.head.weight.detach().clone())\n",
        ),
        engine="fsdp2",
        tensors="*",
    ),
    mutant(
        "gradients clipped before they are reduced",
        "raw_ddp: clip in update 0",
        *_by_hand("dist.all_reduce(p.grad.div_(WORLD_SIZE))", after_clip=True),
        tensors="*",
    ),
    mutant(
        "gradients clipped in each micro-step",
        "raw_ddp: clip in update 0",
        (_CLIP, ""),
        ("            if is_last:\n", _CLIP[4:] + "            if is_last:\n"),
        against="correct",
        tensors="*",
    ),
    mutant(
        "gradients clipped on rank 0 only",
        "raw_ddp: clip in update 0",
        (_CLIP, f"                if RANK == 0:\n    {_CLIP}"),
        tensors="*",
    ),
    mutant(
        "max_norm multiplied by the ranks",
        "raw_ddp: clip in update 0",
        ("parameters(), MAX_NORM)", "parameters(), MAX_NORM * WORLD_SIZE)"),
        tensors="*",
    ),
    mutant(
        "gradients clipped after the step",
        "raw_ddp: clip in update 0",
        (_CLIP + _STEP, _STEP + _CLIP),
        against="correct",
        tensors="*",
    ),
    mutant(
        "only the head clipped",
        "raw_ddp: clip in update 0",
        (_CLIP, _CLIP.replace("model", "net.head")),
        against="correct",
        tensors="*",
    ),
    mutant(
        "another max_norm on each rank, where clipping reduces the gradients",
        "accelerated: clip in update 0",
        ("parameters(), MAX_NORM)", "parameters(), MAX_NORM * (1 + accelerator.process_index))"),
        variant=REDUCED_WHEN_CLIPPED,
        tensors="*",
    ),
    mutant(
        "gradients clipped while the loss scale is still in them",
        "ema_scaler: clip in update 0",
        ("            scaler.unscale_(optimizer)\n", ""),
        against="correct",
        tensors="*",
    ),
    mutant(
        "norm of the rank's shards, fully_shard",
        "fsdp_loop: clip in update 0",
        (
            "nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)",
            "shards = [torch.nn.Parameter(getattr(p, '_local_tensor', p.data)) for p in model.parameters()]\n"
            "                for shard, p in zip(shards, model.parameters(), strict=True):\n"
            "                    shard.grad = getattr(p.grad, '_local_tensor', p.grad)\n"
            "                nn.utils.clip_grad_norm_(shards, MAX_NORM)",
        ),
        tensors="*",
    ),
    mutant(
        "values clipped to a bound divided by the ranks",
        "stream: clip in update 0",
        ("parameters(), 0.2)", "parameters(), 0.2 / WORLD_SIZE)"),
        tensors="*",
    ),
)
