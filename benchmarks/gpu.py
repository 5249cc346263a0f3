"""Measures tokens per second and MFU of language models in bf16: echelon's levels 2 and 3 beside a hand-written loop and other libraries.

    python benchmarks/gpu.py                             # every device of this machine (DistributedDataParallel)
    python benchmarks/gpu.py --mesh tp=2,dp_shard=4      # against parallelize_module + fully_shard by hand
    python benchmarks/gpu.py --cpu --tiny                # only runs the code

Each variant trains the same model on the same tokens in processes of its own: bf16 autocast (on shards: bf16 parameters, float32
reduction), AdamW, clipping. A step is measured after ``--warmup`` steps, from the end of one optimizer step to that of another.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from results import installed
from torch import nn
from torch.utils.data import DataLoader, Dataset

CLIP, RATE = 1.0, 3e-4
# Dense bf16 products without sparsity, in TFLOP/s, by a part of the device's name; from the vendors' data sheets.
PEAKS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "MI300X": 1307.0}


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder."""

    vocabulary: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    length: int
    batch: int
    """Rows of a device in a step."""
    is_llama: bool
    """Rotary positions, RMSNorm, SwiGLU; otherwise GPT-2: learned positions, LayerNorm, GELU, biases, a tied head."""


MODELS = {
    "gpt2": Shape(
        vocabulary=50304, width=768, hidden=3072, heads=12, kv_heads=12, layers=12, length=1024, batch=16, is_llama=False
    ),
    "llama-1b": Shape(
        vocabulary=32000, width=2048, hidden=5632, heads=32, kv_heads=8, layers=20, length=2048, batch=4, is_llama=True
    ),
}  # fmt: skip
TINY = {
    name: Shape(
        vocabulary=64, width=32, hidden=64, heads=4, kv_heads=4, layers=2, length=16, batch=2, is_llama=shape.is_llama
    )
    for name, shape in MODELS.items()
}
PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.gate": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, kv_width = shape.width, shape.width // shape.heads * shape.kv_heads
        norm, bias = (nn.RMSNorm, False) if shape.is_llama else (nn.LayerNorm, True)
        self.head_width = width // shape.heads
        self.first, self.second = norm(width), norm(width)
        self.q, self.o = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)
        self.k, self.v = nn.Linear(width, kv_width, bias=bias), nn.Linear(width, kv_width, bias=bias)
        self.gate = nn.Linear(width, shape.hidden, bias=False) if shape.is_llama else None
        self.up, self.down = nn.Linear(width, shape.hidden, bias=bias), nn.Linear(shape.hidden, width, bias=bias)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if turns is not None:
            q, k = _rotated(q, turns), _rotated(k, turns)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        out: torch.Tensor = x + self.down(hidden)
        return out


def _rotated(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = (part.to(x.dtype) for part in turns)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Decoder(nn.Module):
    """Returns the mean cross-entropy of the next tokens, in a dict as the models of transformers do."""

    _no_split_modules = ("Block",)
    main_input_name = "input_ids"

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = None if shape.is_llama else nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width) if shape.is_llama else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if not shape.is_llama:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the head."""
        x, turns = self.embed(input_ids), None
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        if self.position is not None:
            x = x + self.position(places)
        else:
            half = self.shape.width // self.shape.heads // 2
            angles = places[:, None] * 10000.0 ** (-torch.arange(half, device=places.device) / half)
            turns = (angles.cos(), angles.sin())
        for block in self.blocks:
            x = block(x, turns)
        out: torch.Tensor = self.norm(x)
        return out

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.hidden(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


def build(shape: Shape) -> Decoder:
    torch.manual_seed(0)
    return Decoder(shape)


def num_parameters(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(shape).parameters())


def flops_per_token(shape: Shape) -> float:
    """Return the floating-point operations of a training step per token, as the PaLM paper counts them (appendix B)."""
    looked_up = shape.vocabulary * shape.width if shape.is_llama else shape.length * shape.width
    return 6.0 * (num_parameters(shape) - looked_up) + 12.0 * shape.layers * shape.width * shape.length


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random rows, the same in every variant."""

    def __init__(self, shape: Shape, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(shape.vocabulary, (num_rows, shape.length + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i, :-1], "labels": self.rows[i, 1:]}


# ---- the variants ----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one process was asked to do, and the clock of its steps."""

    shape: Shape
    mesh: dict[str, int]
    steps: int
    warmup: int
    is_cpu: bool
    compiles: bool
    started: float = 0.0
    ended: float = 0.0
    num_steps: int = 0
    loss: float = math.nan

    @property
    def device(self) -> torch.device:
        if self.is_cpu:
            return torch.device("cpu")
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def num_readers(self) -> int:
        return self.world_size // math.prod(self.mesh.get(axis, 1) for axis in ("tp", "cp", "sp"))

    def dataset(self) -> Tokens:
        return Tokens(self.shape, (self.steps + self.warmup) * self.shape.batch * self.num_readers)

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1, fused=not self.is_cpu)

    def ends_step(self, loss: Any = None) -> None:
        """Note the end of an optimizer step."""
        self.num_steps += 1
        if self.num_steps == self.warmup:
            self.started = self._now()
        if self.num_steps == self.warmup + self.steps:
            self.ended = self._now()
            if loss is not None:
                self.loss = float(loss)

    def _now(self) -> float:
        if not self.is_cpu:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def result(self) -> dict[str, float]:
        seconds = (self.ended - self.started) / self.steps
        peak = 0.0 if self.is_cpu else torch.get_device_module(self.device).max_memory_allocated()
        rows = self.shape.batch * self.num_readers
        return {"seconds": seconds, "tokens_per_s": rows * self.shape.length / seconds, "peak": peak, "loss": self.loss}


def by_hand(run: Run) -> None:
    """PyTorch alone: DistributedDataParallel, or ``parallelize_module`` and ``fully_shard`` on a mesh."""
    device, world_size = run.device, run.world_size
    if not run.is_cpu:
        torch.accelerator.set_device_index(device.index)
    if world_size > 1:
        dist.init_process_group(dist.get_default_backend_for_device(device.type))
    model: Any = build(run.shape).to(device)
    reader, clip = dist.get_rank() if world_size > 1 else 0, nn.utils.clip_grad_norm_
    is_sharded = math.prod(run.mesh.values()) > 1
    if is_sharded:
        reader, clip = _on_a_mesh(model, run), clip_on_meshes
    elif world_size > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=None if run.is_cpu else [device.index])
    if run.compiles:
        model = torch.compile(model)
    optimizer = run.optimizer(model.parameters())
    rows = range(reader, len(run.dataset()), run.num_readers)  # row i belongs to reader i % readers
    loader = DataLoader(torch.utils.data.Subset(run.dataset(), rows), batch_size=run.shape.batch)
    for batch in loader:
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with nullcontext() if is_sharded else torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**batch)["loss"]
        loss.backward()
        clip(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        run.ends_step(loss.detach())
    if world_size > 1:
        dist.destroy_process_group()


def _on_a_mesh(model: Any, run: Run) -> int:
    """Split and shard ``model`` in place, and return the number of this rank's reader."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    sizes = {axis: run.mesh.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp")}
    if unknown := set(run.mesh) - set(sizes):
        raise SystemExit(f"by hand there is no layout for {', '.join(sorted(unknown))}: use --only echelon")
    mesh: Any = init_device_mesh(run.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if sizes["tp"] > 1:
        plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
        for i in range(run.shape.layers):
            columns = ("q", "k", "v", "up", *(["gate"] if run.shape.is_llama else []))
            plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in columns}
            plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("o", "down")}
        parallelize_module(model, mesh["tp"], {**plan, "head": ColwiseParallel(output_layouts=Replicate())})
        if not run.shape.is_llama:
            model.head.weight = model.embed.weight  # parallelize_module unties them
    over = mesh["dp_replicate", "dp_shard"] if sizes["dp_replicate"] > 1 else mesh["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=over, mp_policy=policy)
    # As echelon (and Accelerate) on ZeRO stage 3; torch's default keeps the outermost unit gathered.
    fully_shard(model, mesh=over, mp_policy=policy, reshard_after_forward=True)
    return dist.get_rank() // sizes["tp"]


def clip_on_meshes(parameters: Iterable[Any], limit: float) -> None:
    """As ``clip_grad_norm_``, which torch refuses for DTensors of different meshes: one all_reduce per set of sharded axes."""
    gradients = [p.grad for p in parameters]
    parts: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        axes = enumerate(gradient.placements)
        groups = tuple(gradient.device_mesh.get_group(axis) for axis, p in axes if not p.is_replicate())
        parts[groups].append(gradient.to_local())
    total: Any = 0.0
    for groups, locals_ in parts.items():
        squares = torch.stack(torch._foreach_norm(locals_)).square().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    torch._foreach_mul_([gradient.to_local() for gradient in gradients], (limit / (total.sqrt() + 1e-6)).clamp(max=1.0))


def with_accelerator(run: Run, library: str) -> None:
    """A loop on the Accelerator of ``library``, which both have the same names in."""
    accelerator_class: Any = importlib.import_module(library).Accelerator
    options: dict[str, Any] = {"parallelism_config": _parallelism(run)} if run.mesh else {}
    if run.compiles:
        options["dynamo_backend"] = "inductor"
    accelerator = accelerator_class(mixed_precision="bf16", cpu=run.is_cpu, **options)
    model: Any = build(run.shape)
    model, optimizer, loader = accelerator.prepare(
        model, run.optimizer(model.parameters()), DataLoader(run.dataset(), batch_size=run.shape.batch)
    )
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        run.ends_step(loss.detach())
    accelerator.end_training()


def _parallelism(run: Run) -> Any:
    from echelon import ParallelismConfig
    from echelon.utils import TorchTensorParallelConfig

    plan = {name: style for name, style in PLAN.items() if run.shape.is_llama or not name.endswith("gate")}
    if not run.shape.is_llama:
        plan["head"] = "colwise_gather_output"
    handler = TorchTensorParallelConfig(plan=plan) if run.mesh.get("tp", 1) > 1 else None
    sizes: dict[str, Any] = {f"{axis}_size": size for axis, size in run.mesh.items()}
    return ParallelismConfig(**sizes, tp_handler=handler)


def with_trainer(run: Run, library: str) -> None:
    """The Trainer of ``library``."""
    package = importlib.import_module(library)

    class Clock(package.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.ends_step()

    options: dict[str, Any] = {"parallelism_config": _parallelism(run)} if run.mesh else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = package.TrainingArguments(
            output_dir=folder,
            use_cpu=run.is_cpu,
            per_device_train_batch_size=run.shape.batch,
            max_steps=run.steps + run.warmup,
            bf16=True,
            learning_rate=RATE,
            weight_decay=0.1,
            lr_scheduler_type="constant",
            optim="adamw_torch" if run.is_cpu else "adamw_torch_fused",
            max_grad_norm=CLIP,
            torch_compile=run.compiles,
            save_strategy="no",
            logging_strategy="steps",
            logging_steps=run.steps + run.warmup,
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        trainer = package.Trainer(build(run.shape), arguments, train_dataset=run.dataset(), callbacks=[Clock()])
        trainer.train()
    run.loss = float(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))


def with_fabric(run: Run) -> None:
    """A loop on Lightning's Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(
        accelerator="cpu" if run.is_cpu else "auto",
        strategy="ddp" if run.world_size > 1 else "auto",
        devices=run.world_size,
        precision="bf16-mixed",
    )
    fabric.launch()
    model: Any = build(run.shape)
    if run.compiles:
        model = torch.compile(model)
    model, optimizer = fabric.setup(model, run.optimizer(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(run.dataset(), batch_size=run.shape.batch))
    for batch in loader:
        loss = model(**batch)["loss"]
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        run.ends_step(loss.detach())


VARIANTS: dict[str, Callable[[Run], None]] = {
    "by hand": by_hand,
    "echelon Accelerator": lambda run: with_accelerator(run, "echelon"),
    "echelon Trainer": lambda run: with_trainer(run, "echelon"),
    "accelerate": lambda run: with_accelerator(run, "accelerate"),
    "lightning Fabric": with_fabric,
    "transformers Trainer": lambda run: with_trainer(run, "transformers"),
}
ON_MESHES = ("by hand", "echelon Accelerator", "echelon Trainer")


# ---- the command -----------------------------------------------------------------------------------------------------


def is_installed(variant: str) -> bool:
    package = variant.split()[0]
    if package in ("by", "echelon"):
        return True
    # The Trainer of transformers needs accelerate.
    return installed(package) and (package != "transformers" or installed("accelerate"))


def device_name(is_cpu: bool) -> str:
    device = None if is_cpu else torch.accelerator.current_accelerator()
    if device is None:
        return f"CPU, {os.cpu_count()} cores"
    return str(torch.get_device_module(device).get_device_name(0))


def peak_of(name: str) -> float:
    return next((peak for part, peak in PEAKS.items() if part in name), math.nan)


def mesh_of(text: str) -> dict[str, int]:
    """``tp=2,dp_shard=4`` -> the size of each axis."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    try:
        return {axis.strip(): int(size) for axis, _, size in pairs}
    except ValueError:
        raise SystemExit(f"--mesh {text!r} is no list of sizes: write --mesh tp=2,dp_shard=4") from None


def measured(variant: str, model: str, num_processes: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one variant in processes of its own."""
    start = [sys.executable]
    if num_processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    command = [*start, __file__, "--model", model, "--only", variant, "--worker", "--steps", str(arguments.steps)]
    command += ["--warmup", str(arguments.warmup), "--mesh", arguments.mesh]
    command += [f"--{name}" for name in ("cpu", "tiny", "compile") if getattr(arguments, name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if arguments.cpu else dict(os.environ)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not results:
        raise SystemExit(f"{variant} with {model} failed (exit status {done.returncode}):\n{done.stderr[-4000:]}")
    found: dict[str, float] = results[0]
    return found


def work(arguments: argparse.Namespace) -> None:
    """Run one variant with each model in this process. Rank zero prints the results as JSON, or appends them to ``--results``."""
    warnings.simplefilter("ignore")
    for model in arguments.model:
        run = Run(
            shape=(TINY if arguments.tiny else MODELS)[model],
            mesh=mesh_of(arguments.mesh),
            steps=arguments.steps,
            warmup=arguments.warmup,
            is_cpu=arguments.cpu,
            compiles=arguments.compile,
        )
        if not arguments.cpu:
            gc.collect()  # the last model
            torch.accelerator.empty_cache()
            torch.get_device_module(run.device).reset_peak_memory_stats()
        VARIANTS[arguments.only[0]](run)
        if int(os.environ.get("RANK", "0")) != 0:
            continue
        print("result " + json.dumps(run.result()), flush=True)
        if arguments.results is not None:
            labels = {"variant": arguments.only[0], "model": model, "is_compiled": arguments.compile}
            append_result(arguments.results, name=f"{arguments.only[0]}, {model}", **labels, **run.result())


def append_result(file: Path, **values: Any) -> None:
    """Append a line to the results of `gpu_day.py`, so that it outlives this process."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"kind": "result", "job": os.environ.get("GPU_DAY_JOB"), **values}) + "\n")


def table(model: str, num_processes: int, arguments: argparse.Namespace) -> list[str]:
    """Return the table of one model."""
    shape = (TINY if arguments.tiny else MODELS)[model]
    peak = arguments.peak_tflops or peak_of(device_name(arguments.cpu))
    mesh = mesh_of(arguments.mesh)
    chosen = [name for name in VARIANTS if not arguments.only or any(part in name for part in arguments.only)]
    lines = [
        f"{model}: {num_parameters(shape) / 1e6:.0f} M parameters, {shape.batch} x {shape.length} tokens per reader and step, "
        f"{num_processes} device(s), {arguments.mesh or ('DistributedDataParallel' if num_processes > 1 else 'one device')}"
        f"{', torch.compile' if arguments.compile else ''}",
        "",
        "| variant | ms per step | tokens/s | of by hand | MFU | peak memory, GiB | last loss |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    rates: dict[str, list[float]] = defaultdict(list)
    results: dict[str, dict[str, float]] = {}
    names = [name for name in chosen if is_installed(name) and (not mesh or name in ON_MESHES)]
    for round_ in range(arguments.rounds):  # in turns, because clocks and temperatures drift
        for name in names if round_ % 2 == 0 else reversed(names):
            results[name] = measured(name, model, num_processes, arguments)
            rates[name].append(results[name]["tokens_per_s"])
    for name in names:
        found, rate = results[name], max(rates[name])
        of_hand = f"{rate / max(rates['by hand']):.3f}" if "by hand" in rates else ""
        used = rate * flops_per_token(shape) / (peak * 1e12 * num_processes)
        seconds = (
            shape.length * shape.batch * (num_processes // math.prod(mesh.get(a, 1) for a in ("tp", "cp", "sp"))) / rate
        )
        lines.append(
            f"| {name} | {1e3 * seconds:.1f} | {rate:,.0f} | {of_hand} | {'' if math.isnan(used) else f'{100 * used:.1f} %'} "
            f"| {found['peak'] / 2**30:.1f} | {found['loss']:.3f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="only this one; may be repeated")
    parser.add_argument("--only", action="append", help="part of the name of a variant; may be repeated")
    parser.add_argument(
        "--mesh", default="", help="sizes of the axes: tp=2,dp_shard=4 (default: copies on all devices)"
    )
    parser.add_argument("--steps", type=int, default=50, help="measured steps")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each variant, of which the fastest counts")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--cpu", action="store_true", help="on CPUs")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--num-processes", type=int, help="default: the devices, or the product of --mesh")
    parser.add_argument("--peak-tflops", type=float, help="of a device in bf16, for MFU; default: known devices")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    if not arguments.cpu and not torch.accelerator.is_available():
        print("there is no accelerator: nothing to measure (--cpu --tiny runs the code on this machine)")
        return
    product = math.prod(mesh_of(arguments.mesh).values())
    num_devices = 1 if arguments.cpu else torch.accelerator.device_count()
    num_processes = arguments.num_processes or (product if arguments.mesh else num_devices)
    if not arguments.cpu and num_processes > num_devices:
        raise SystemExit(f"--mesh {arguments.mesh} needs {num_processes} devices, and this machine has {num_devices}")
    print(f"## Language models on {num_processes} x {device_name(arguments.cpu)}\n")
    for model in arguments.model or MODELS:
        print("\n".join(table(model, num_processes, arguments)) + "\n", flush=True)
    versions = [
        f"{name} {version(name)}" for name in ("torch", "echelon", "accelerate", "transformers") if installed(name)
    ]
    print(f"{date.today()}, Python {platform.python_version()}; {', '.join(versions)}.")
    print(f"Repeat: `python {' '.join(['benchmarks/gpu.py', *sys.argv[1:]])}`.")


if __name__ == "__main__":
    main()
