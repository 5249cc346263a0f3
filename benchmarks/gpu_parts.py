"""The programs of `gpu_day.py`: ``python benchmarks/gpu_parts.py NAME --results FILE``. Each appends its results to FILE."""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gpu import CLIP, MODELS, RATE, TINY, Decoder, Tokens, append_result, build, device_name
from results import installed
from torch import nn
from torch.utils.data import DataLoader

HERE = Path(__file__).resolve().parent


class Part:
    """What one program was asked to do, and where its results go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.is_cpu, self.is_tiny = arguments.cpu, arguments.tiny
        self.file = arguments.results
        self.arguments = arguments

    @property
    def device(self) -> torch.device:
        accelerator = None if self.is_cpu else torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)

    def report(self, name: str, **values: Any) -> None:
        """Append a result. Only rank zero does."""
        print(name, values, flush=True)
        if int(os.environ.get("RANK", "0")) == 0 and self.file is not None:
            append_result(self.file, name=name, **values)

    def now(self) -> float:
        """Return the time after everything on the device has ended."""
        if not self.is_cpu:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def peak_bytes(self) -> int:
        return 0 if self.is_cpu else int(torch.get_device_module(self.device).max_memory_allocated())

    def accelerator(self, **options: Any) -> Any:
        from echelon import Accelerator

        return Accelerator(cpu=self.is_cpu, **options)


# ---- 1: facts --------------------------------------------------------------------------------------------------------


def facts(part: Part) -> None:
    """The device, the versions, and two ceilings: a copy on the device, and a matrix product in bf16."""
    names = ("torch", "accelerate", "transformers", "lightning", "peft", "torchao", "triton", "tomli_w")
    part.report(
        "versions",
        python=platform.python_version(),
        **{name: version(name) if installed(name) else None for name in names},
    )
    about: dict[str, Any] = {"device": device_name(part.is_cpu), "cpus": os.cpu_count()}
    if not part.is_cpu:
        from echelon.base.device import nccl_version

        free, total = torch.get_device_module(part.device).mem_get_info(0)
        about |= {"cuda": torch.version.cuda, "nccl": nccl_version(), "free_bytes": free, "total_bytes": total}
    part.report("device", **about)
    if shutil.which("nvidia-smi") and not part.is_cpu:
        query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        asked = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        part.report("nvidia-smi", **dict(zip(query.split(","), asked.stdout.strip().split(", "))))
    size = 256 if part.is_tiny else 8192
    a, b = (torch.randn(size, size, device=part.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _median_s(part, lambda: a @ b)
    part.report("bf16 product", size=size, tflop_per_s=2 * size**3 / seconds / 1e12)
    source = torch.randn(1 << (16 if part.is_tiny else 30), device=part.device)
    target = torch.empty_like(source)
    seconds = _median_s(part, lambda: target.copy_(source))
    part.report("copy", num_bytes=source.nbytes, tb_per_s=2 * source.nbytes / seconds / 1e12)


def _median_s(part: Part, run: Callable[[], Any], times: int = 10) -> float:
    for _ in range(3):
        run()
    found = []
    for _ in range(times):
        began = part.now()
        run()
        found.append(part.now() - began)
    return statistics.median(found)


# ---- 2: the contract and the tests -----------------------------------------------------------------------------------


def contract(part: Part) -> None:
    """Each check of the engine contract. With ``--shared`` the ranks share one device, and gloo moves its tensors."""
    from echelon import Accelerator
    from echelon.distributed import setup
    from echelon.testing import engine_contract

    engine, num_ranks = part.arguments.engine, int(os.environ["WORLD_SIZE"])
    if part.arguments.shared:
        setup(backend="gloo")
    failed = []
    for check in engine_contract.CHECKS:
        name = f"{engine}, {num_ranks} rank(s), {check.__name__}"
        try:
            check(partial(Accelerator, engine=engine, cpu=part.is_cpu))
        except Exception as error:
            traceback.print_exc()
            failed.append(name)
            part.report(name, engine=engine, ranks=num_ranks, passed=False, error=_short(error))
            if num_ranks > 1:
                raise SystemExit(1) from error  # the other rank may be in the middle of the check
        else:
            part.report(name, engine=engine, ranks=num_ranks, passed=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def tests(part: Part) -> None:
    """The tests of one file. Each result is known when the test ends."""
    import pytest

    class Recorder:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                error = str(report.longrepr)[-600:] if report.failed else None
                part.report(report.nodeid, passed=None if report.skipped else report.passed, error=error)

    # The language models are part 4.
    chosen = ["-m", "gpu", "-v", "-k", "not benchmark_of_language_models", *(["--collect-only"] if part.is_cpu else [])]
    root = str(HERE.parent)
    os.chdir(root)
    sys.path.insert(0, root)
    raise SystemExit(int(pytest.main([*chosen, part.arguments.file], plugins=[Recorder()])))


# ---- 3: synchronisations ---------------------------------------------------------------------------------------------

WARMUP, WATCHED = 5, 10
SETTINGS: list[dict[str, Any]] = [
    {"precision": precision, "clip": clip, "accumulate": accumulate, "fused": True}
    for precision in ("no", "bf16", "fp16")
    for clip, accumulate in ((False, 1), (True, 1), (True, 2))
] + [{"precision": "fp16", "clip": True, "accumulate": 1, "fused": False}]


class Syncs:
    """Counts the calls that wait for the device, with the line that made each."""

    def __init__(self, part: Part) -> None:
        self.is_cpu = part.is_cpu
        self.lines: Counter[str] = Counter()
        self._stack = ExitStack()
        self._num_steps = 0

    def ends_step(self) -> None:
        """Watch the steps after the first WARMUP."""
        self._num_steps += 1
        if self._num_steps == WARMUP and not self.is_cpu:
            torch.accelerator.synchronize()
            self._stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = self._shown
            torch.cuda.set_sync_debug_mode("warn")
        if self._num_steps == WARMUP + WATCHED and not self.is_cpu:
            torch.cuda.set_sync_debug_mode("default")
            self._stack.close()

    def _shown(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" not in str(message):
            return
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
        frames = [frame for frame in frames if not frame.filename.endswith("warnings.py")][:-1]
        own = frames[-1]
        self.lines[
            f"{Path(own.filename).parent.name}/{Path(own.filename).name}:{own.lineno} {own.name}: {own.line}"
        ] += 1


def syncs(part: Part) -> None:
    """Waits for the device in steps that log nothing, of a loop on pinned memory."""
    loop = part.arguments.loop
    for setting in SETTINGS[:3] if part.is_tiny else SETTINGS:
        watch = Syncs(part)
        LOOPS[loop](part, setting, watch)
        number = None if part.is_cpu else sum(watch.lines.values())
        part.report(
            f"{loop}, {setting}", loop=loop, **setting, steps=WATCHED, syncs=number, lines=watch.lines.most_common(5)
        )


def _loader(setting: dict[str, Any], *, pin: bool) -> DataLoader[Any]:
    shape = TINY["gpt2"]
    return DataLoader(
        Tokens(shape, (WARMUP + WATCHED) * setting["accumulate"] * shape.batch), batch_size=shape.batch, pin_memory=pin
    )


def _adamw(part: Part, model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused and not part.is_cpu)


def _level1(part: Part, setting: dict[str, Any], watch: Syncs) -> None:
    from echelon.distributed import process_group, shard

    dtype = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[setting["precision"]]
    scaler = torch.amp.GradScaler(part.device.type, enabled=dtype is torch.float16)
    with process_group() as world:
        model = nn.parallel.DistributedDataParallel(build(TINY["gpt2"]).to(world.device))
        optimizer = _adamw(part, model, fused=setting["fused"])
        for number, batch in enumerate(shard(_loader(setting, pin=not part.is_cpu))):
            moved = {name: value.to(world.device, non_blocking=True) for name, value in batch.items()}
            with torch.autocast(world.device.type, dtype=dtype) if dtype is not None else nullcontext():
                loss = model(**moved)["loss"] / setting["accumulate"]
            scaler.scale(loss).backward()
            if (number + 1) % setting["accumulate"]:
                continue
            if setting["clip"]:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.ends_step()


def _level2(part: Part, setting: dict[str, Any], watch: Syncs, *, engine: str) -> None:
    accelerator = part.accelerator(
        engine=engine, mixed_precision=setting["precision"], gradient_accumulation_steps=setting["accumulate"]
    )
    model: Any = build(TINY["gpt2"])
    model, optimizer, loader = accelerator.prepare(
        model, _adamw(part, model, fused=setting["fused"]), _loader(setting, pin=not part.is_cpu)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if setting["clip"] and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            watch.ends_step()


def _level3(part: Part, setting: dict[str, Any], watch: Syncs) -> None:
    from echelon import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.ends_step()

    shape = TINY["gpt2"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=part.is_cpu,
            per_device_train_batch_size=shape.batch,
            gradient_accumulation_steps=setting["accumulate"],
            max_steps=WARMUP + WATCHED,
            bf16=setting["precision"] == "bf16",
            fp16=setting["precision"] == "fp16",
            max_grad_norm=CLIP if setting["clip"] else 0.0,
            optim="adamw_torch_fused" if setting["fused"] and not part.is_cpu else "adamw_torch",
            save_strategy="no",
            logging_steps=1000,
            report_to="none",
            disable_tqdm=True,
        )
        rows = Tokens(shape, (WARMUP + WATCHED) * setting["accumulate"] * shape.batch)
        Trainer(build(shape), arguments, train_dataset=rows, callbacks=[Watch()]).train()


LOOPS: dict[str, Callable[[Part, dict[str, Any], Syncs], None]] = {
    "level1": _level1,
    "single": partial(_level2, engine="single"),
    "ddp": partial(_level2, engine="ddp"),
    "fsdp2": partial(_level2, engine="fsdp2"),
    "trainer": _level3,
}


# ---- 5: numbers ------------------------------------------------------------------------------------------------------

STEPS = 20
NUMBERS = "twenty float32 steps of AdamW"


def numbers(part: Part) -> None:
    """Losses and weights of float32 steps beside those of a plain loop on the CPU; exact and bitwise parity on the device."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.allow_tf32 = False
    expected = _by_hand(torch.device("cpu"))
    if part.arguments.shared:
        from echelon.distributed import setup

        setup(backend="gloo")
        for parity in ("exact", "bitwise"):
            _compare(part, f"{parity}, 2 ranks", _prepared(part, parity=parity), expected)
        return
    if part.arguments.engine == "fsdp2":
        for parity in ("off", "exact"):
            _compare(part, f"fsdp2, {parity}", _prepared(part, engine="fsdp2", parity=parity), expected)
        return
    by_hand = _by_hand(part.device)
    _compare(part, "by hand", by_hand, expected)
    found = {
        "Accelerator": _prepared(part),
        "exact": _prepared(part, parity="exact"),
        "exact, micro-batches of 1": _prepared(part, parity="exact", max_micro_batch_size=1),
        "bitwise": _prepared(part, parity="bitwise"),
        "Trainer": _trained(part),
    }
    for name, losses_and_weights in found.items():
        _compare(part, name, losses_and_weights, expected, by_hand)
    again = _prepared(part, parity="bitwise")
    part.report("bitwise, repeated", equal_bits=all(map(torch.equal, again[1], found["bitwise"][1])))


Numbers = tuple[list[float], list[torch.Tensor]]


def _compare(part: Part, name: str, found: Numbers, expected: Numbers, by_hand: Numbers | None = None) -> None:
    """Report the largest differences of the losses, relative, and of the weights, relative to the largest weight of their tensor."""
    losses = max((abs(a - b) / abs(b) for a, b in zip(found[0], expected[0])), default=None)
    weights = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found[1], expected[1]))
    equal = None if by_hand is None else all(map(torch.equal, found[1], by_hand[1]))
    part.report(
        name, loss_difference=losses, weight_difference=weights, bits_of_by_hand=equal, digest=_digest(found[1])
    )


def _digest(weights: list[torch.Tensor]) -> str:
    import xxhash

    found = xxhash.xxh3_128()
    for weight in weights:
        found.update(weight.contiguous().numpy().tobytes())
    return found.hexdigest()


def _rows() -> DataLoader[Any]:
    shape = TINY["gpt2"]
    return DataLoader(Tokens(shape, STEPS * 4), batch_size=4)


def _by_hand(device: torch.device) -> Numbers:
    model = build(TINY["gpt2"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in _rows():
        loss = model(**{name: value.to(device) for name, value in batch.items()})["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, _weights(model)


def _weights(model: Decoder) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _prepared(part: Part, **options: Any) -> Numbers:
    accelerator = part.accelerator(**options)
    model: Any = build(TINY["gpt2"])
    names = [name for name, _ in model.named_parameters()]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), _rows())
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    state = accelerator.get_state_dict(model)
    # With micro-batches, or on several ranks, the last loss of an update is that of a part.
    is_whole = (
        accelerator.num_processes == 1 and "max_micro_batch_size" not in options and options.get("parity") != "bitwise"
    )
    return losses if is_whole else [], [state[name].cpu() for name in names]


def _trained(part: Part) -> Numbers:
    from echelon import Trainer, TrainingArguments

    shape = TINY["gpt2"]
    model = build(shape)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=part.is_cpu,
            per_device_train_batch_size=4,
            max_steps=STEPS,
            learning_rate=1e-3,
            weight_decay=0.01,  # of every parameter below
            lr_scheduler_type="constant",
            optim="adamw_torch",
            max_grad_norm=CLIP,
            train_sampling_strategy="sequential",
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = Trainer(model, arguments, train_dataset=Tokens(shape, STEPS * 4), optimizers=(optimizer, None))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, _weights(model)


# ---- 6: a background save --------------------------------------------------------------------------------------------


def save(part: Part) -> None:
    """Time that a save blocks, and that a step takes meanwhile."""
    shape = (TINY if part.is_tiny else MODELS)["gpt2"]
    accelerator = part.accelerator(mixed_precision="bf16")
    model: Any = build(shape)
    loader = DataLoader(Tokens(shape, 400 * shape.batch), batch_size=shape.batch)
    model, optimizer, loader = accelerator.prepare(model, _adamw(part, model), loader)
    batches = iter(loader)

    def step() -> float:
        began = part.now()
        accelerator.backward(model(**next(batches))["loss"])
        optimizer.step()
        optimizer.zero_grad()
        return part.now() - began

    times = 2 if part.is_tiny else 30
    for _ in range(3):
        step()
    alone = [step() for _ in range(times)]
    with tempfile.TemporaryDirectory() as folder:
        began = part.now()
        accelerator.save_state(f"{folder}/blocking")
        blocking = part.now() - began
        for turn in ("first", "second"):  # the first allocates the pinned memory
            began = part.now()
            accelerator.save_state(f"{folder}/{turn}", blocking=False)
            blocked = part.now() - began
            beside = [step() for _ in range(times)]
            part.report(
                f"{turn} background save",
                num_bytes=sum(file.stat().st_size for file in Path(folder, "blocking").rglob("*") if file.is_file()),
                blocking_save_s=blocking,
                blocked_s=blocked,
                step_s=statistics.median(alone),
                step_beside_s=statistics.median(beside),
                steps=times,
            )
        accelerator.end_training()


# ---- 7: memory -------------------------------------------------------------------------------------------------------


def memory(part: Part) -> None:
    """Memory and time of a step: sharded by fsdp2, recomputed blocks, 16-bit weights, chunked loss, QLoRA, fp8, weights on the CPU."""
    from echelon import FullyShardedDataParallelPlugin
    from echelon.utils import BnbQuantizationConfig, load_and_quantize_model

    mode = part.arguments.mode
    shape = (TINY if part.is_tiny else MODELS)["llama-1b"]
    options: dict[str, Any] = {"mixed_precision": "bf16"}
    if mode == "fp8":
        options["mixed_precision"] = "fp8"
        if part.is_cpu:
            from torchao.float8 import Float8LinearConfig

            from echelon.utils import AORecipeKwargs

            options["kwargs_handlers"] = [AORecipeKwargs(config=Float8LinearConfig(emulate=True))]
    else:
        options["engine"] = "fsdp2"  # without it, one process is not sharded
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_offload=mode == "offload", auto_wrap_policy="transformer_based_wrap"
        )
    if mode.startswith("blocks "):
        options["activation_checkpointing"] = mode.removeprefix("blocks ")
    if mode == "bf16 kept":
        options["master_weights"] = "keep"
    accelerator = part.accelerator(**options)
    model: Any = ChunkedDecoder(shape) if mode == "chunked loss" else build(shape)
    if mode.startswith("bf16"):
        model.to(torch.bfloat16)
    if mode == "qlora":
        from peft import LoraConfig, inject_adapter_in_model

        quantization = BnbQuantizationConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16", skip_modules=["head"]
        )
        model = load_and_quantize_model(model, quantization, device_map={"": accelerator.device})
        model.requires_grad_(False)
        model = inject_adapter_in_model(
            LoraConfig(r=16, target_modules=["q", "k", "v", "o", "up", "down", "gate"]), model
        )
    steps, warmup = (2, 1) if part.is_tiny else (10, 3)
    loader = DataLoader(Tokens(shape, (steps + warmup) * shape.batch), batch_size=shape.batch)
    # On the CPU, torch's fused AdamW takes the gradients that fsdp2 leaves there, too.
    model, optimizer, loader = accelerator.prepare(model, _adamw(part, model), loader)
    times, began = [], part.now()
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        now = part.now()
        times.append(now - began)
        began = now
    part.report(mode, step_s=statistics.median(times[warmup:]), peak_bytes=part.peak_bytes(), last_loss=loss.item())
    accelerator.end_training()


class ChunkedDecoder(Decoder):
    """A Decoder that never has all logits in memory."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        from echelon import linear_cross_entropy

        assert labels is not None
        return {"loss": linear_cross_entropy(self.hidden(input_ids), self.head.weight, labels, chunk_size=1024)}


# ---- 8: failures -----------------------------------------------------------------------------------------------------

FAILURES = {
    "memory": """
        model = torch.nn.Linear(64, 64)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(1 << {40 if is_cpu else 34}, 64, device=accelerator.device)
        accelerator.backward(model(x).sum())
        """,
    "access": """
        embedding = torch.nn.Embedding(8, 4)
        embedding, optimizer = accelerator.prepare(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1))
        for step in range(3):
            tokens = torch.arange(6, device=accelerator.device) + 3 * step
            accelerator.backward(embedding(tokens).sum())
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize() if torch.accelerator.is_available() else None
        """,
    "timeout": """
        import time
        import torch.distributed as dist
        model = torch.nn.Linear(64, 64)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        dist.all_reduce(torch.ones(4, device=accelerator.device))  # creates the communicator, which waits for the device
        if accelerator.device.type == "cuda":
            torch.cuda._sleep(80 * 10**9)  # cycles: the collective behind it does not begin before its time is over
        elif accelerator.process_index == 1:
            time.sleep(30)
        x = torch.ones(4, device=accelerator.device)
        dist.all_reduce(x)
        print(x.sum().item())
        """,
    "devices": """
        accelerator.wait_for_everyone()
        """,
}


def failure(part: Part) -> None:
    """What is printed when a program under ``echelon launch`` fails: its exit code and its last lines."""
    import textwrap

    kind = part.arguments.kind
    engine = (
        "engine='ddp', kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))]"
        if kind == "timeout"
        else ""
    )
    body = textwrap.dedent(FAILURES[kind]).replace("{40 if is_cpu else 34}", "40" if part.is_cpu else "34")
    program = Path("train.py")
    program.write_text(
        "from datetime import timedelta\nimport torch\nfrom echelon import Accelerator, InitProcessGroupKwargs\n"
        f"accelerator = Accelerator({engine})\n{body}"
    )
    processes = 2 if kind == "devices" or (kind == "timeout" and part.is_cpu) else 1
    flags = ["--cpu"] if part.is_cpu else []
    if part.is_cpu and kind == "devices":
        flags = ["--gpu_ids", "0"]
    command = [sys.executable, "-m", "echelon", "launch", "--num_processes", str(processes), *flags, str(program)]
    began = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    print("\n".join(lines))
    says = [word for word in ("do:", "where:") if any(word in line for line in lines)]
    part.report(kind, exit_code=ended.returncode, seconds=time.perf_counter() - began, says=says, lines=lines[-40:])
    if ended.returncode == 0:
        raise SystemExit("the program was expected to fail")


# ---- planted ---------------------------------------------------------------------------------------------------------


def failing(part: Part) -> None:
    """Fail after a result, for the tests of `gpu_day.py`."""
    part.report("planted", value=1)
    raise RuntimeError("planted")


def hanging(part: Part) -> None:
    """Hang after a result, for the tests of `gpu_day.py`."""
    part.report("planted", value=2)
    while True:
        time.sleep(1)


PROGRAMS: dict[str, Callable[[Part], None]] = {
    "facts": facts,
    "contract": contract,
    "tests": tests,
    "syncs": syncs,
    "numbers": numbers,
    "save": save,
    "memory": memory,
    "failure": failure,
    "failing": failing,
    "hanging": hanging,
    "missing": failing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=list(PROGRAMS))
    parser.add_argument("--engine", default="single")
    parser.add_argument("--loop", choices=list(LOOPS), default="single")
    parser.add_argument("--mode", default="plain")
    parser.add_argument("--kind", choices=list(FAILURES), default="memory")
    parser.add_argument("--file", default="tests/gpu")
    parser.add_argument("--shared", action="store_true", help="all ranks use device 0")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    faulthandler.enable()
    if "GPU_DAY_ENDS_AT" in os.environ:
        # Print the stack and exit shortly before gpu_day.py kills this process, also if gpu_day.py itself was killed.
        left = float(os.environ["GPU_DAY_ENDS_AT"]) - time.time()
        faulthandler.dump_traceback_later(max(0.1, left - 1.0), exit=True)
    PROGRAMS[arguments.program](Part(arguments))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
