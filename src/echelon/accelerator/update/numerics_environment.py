"""Records, compares or rejects everything outside the program that affects the bits of ``parity="bitwise"``."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from echelon.accelerator.compile import is_compiled_module
from echelon.base.errors import CheckpointError, ConfigError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.config.variables import library_variable, users_threads
from echelon.distributed.collectives import gather_object
from echelon.engines.optimizer_probe import ProbeError, probe_optimizer

_EXACT = "or use parity='exact'"
# Source: "Results reproducibility" in cuBLAS's documentation; torch.use_deterministic_algorithms requires one of them, too.
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
# Optimizers that update each element independently, so that any shard of a parameter gives the same result.
_BY_ELEMENT = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsEnvironment:
    """Properties that determine the exact bits of a bitwise run."""

    canonical_shards: int
    """Number of shards per update."""
    threads: int
    """Number of CPU threads per process, which determines how kernels split their work."""
    torch_build: str
    """torch version and commit."""
    processor: str
    """CPU or accelerator type, which determines which kernels are used."""
    canonical_chunks: int = 0
    """Number of chunks of each dimension that tensor parallelism may split; 0 if layers are computed whole."""

    @classmethod
    def here(cls, canonical_shards: int, device: torch.device, canonical_chunks: int = 0) -> NumericsEnvironment:
        """Return the properties of this process."""
        return cls(
            canonical_shards=canonical_shards,
            threads=torch.get_num_threads(),
            torch_build=f"{torch.__version__} ({torch.version.git_version[:8]})",
            processor=_processor(device),
            canonical_chunks=canonical_chunks,
        )

    def require(self, saved: Mapping[str, Any], folder: object) -> None:
        """Compare with the properties saved in a checkpoint.

        Raises:
            CheckpointError: the properties differ, so the resumed run would not be bit-identical.
        """
        num_chunks = saved.get("canonical_chunks", 0)
        remedies = {
            "canonical_shards": f"set canonical_shards={saved['canonical_shards']}",
            "threads": f"set OMP_NUM_THREADS={saved['threads']}",
            "torch_build": "install that torch version",
            "processor": "resume on a processor of that type",
            "canonical_chunks": f"pass ParallelismConfig(tp_handler=TorchTensorParallelConfig(canonical_chunks={num_chunks}))"
            if num_chunks
            else "remove tp_size and tp_handler",
        }
        for field in fields(self):
            there, here = {"canonical_chunks": 0, **saved}[field.name], getattr(self, field.name)
            if there != here:
                raise CheckpointError(
                    f"{folder} was saved by a bitwise run with {field.name} = {there}, but this run has {field.name} "
                    f"= {here}, so its results would not be bit-identical",
                    where="parity='bitwise'",
                    do=f"{remedies[field.name]}; or, if differences in the last bits are acceptable, load it with "
                    "parity='exact' (save_state() then writes a checkpoint that a new bitwise run can start from)",
                )


def build_numerics_environment(
    config: Resolved[RunConfig], device: torch.device, *, num_chunks: int = 0
) -> NumericsEnvironment:
    """Set the number of threads, and return the environment that all ranks share.

    Collective: call on every rank.

    Raises:
        ConfigError: the environment differs between ranks, or torch may choose kernels whose results vary between runs.
    """
    # torch's default depends on how a process was started, the launcher's on the machine and the number of processes.
    torch.set_num_threads(users_threads() or 1)
    own = NumericsEnvironment.here(config.value.canonical_shards, device, num_chunks)
    if dist.is_initialized() and dist.get_world_size() > 1:
        by_rank = gather_object([asdict(own)])
        for name, value in by_rank[0].items():
            other = next((rank for rank, one in enumerate(by_rank) if one[name] != value), None)
            if other is not None:
                raise ConfigError(
                    _(
                        "{name} is {value} on rank 0 but {by_rank} on rank {other}, so results would differ",
                        name=name,
                        value=value,
                        by_rank=by_rank[other][name],
                        other=other,
                    ),
                    where="parity='bitwise'",
                    do=f"use the same value on all ranks (threads: set OMP_NUM_THREADS), {_EXACT}",
                )
    refuse_kernels(device, threads=own.threads)
    refuse_compilation(config.value)
    return own


def _processor(device: torch.device) -> str:
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    info = Path("/proc/cpuinfo")
    found = dict.fromkeys(("vendor_id", "cpu family", "model", "CPU implementer", "CPU part"), "")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if found.get(name.strip()) == "":
            found[name.strip()] = value.strip()
    named = " ".join(value for value in found.values() if value) or platform.processor()
    return f"{platform.machine()} {named} {torch.backends.cpu.get_cpu_capability()}"


def refuse_kernels(device: torch.device, *, threads: int) -> None:
    """Raise if torch may choose kernels whose results vary between runs.

    Raises:
        ConfigError: torch may choose such kernels; the message names each feature and how to turn it off.
    """
    is_deterministic = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    found: dict[str, str] = {}
    if not is_deterministic and (device.type != "cpu" or threads > 1):
        alternative = ", or set OMP_NUM_THREADS=1" if device.type == "cpu" else ""
        found["nondeterministic operations"] = f"call torch.use_deterministic_algorithms(True){alternative}"
    if device.type == "cuda":
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        if library_variable("CUBLAS_WORKSPACE_CONFIG") not in _DETERMINISTIC_WORKSPACES:
            found["cuBLAS workspaces of any size"] = "set the environment variable CUBLAS_WORKSPACE_CONFIG=:4096:8"
        if matmul.allow_tf32:
            found["tf32 in matrix products"] = "set torch.backends.cuda.matmul.allow_tf32 = False"
        if cudnn.allow_tf32:  # torch's default
            found["tf32 in convolutions"] = "set torch.backends.cudnn.allow_tf32 = False"
        if cudnn.benchmark:
            found["kernels selected by benchmarking"] = "set torch.backends.cudnn.benchmark = False"
    if found:
        with_threads = f" with {threads} threads" if device.type == "cpu" else ""
        raise ConfigError(
            f"torch may use {', '.join(found)} on {device.type}{with_threads}",
            where="parity='bitwise'",
            do=f"before the Accelerator is created: {'; '.join(found.values())}; {_EXACT}",
        )


def refuse_compilation(config: RunConfig) -> None:
    """Raise if torch.compile may choose kernels depending on the shapes that a process has seen before.

    Raises:
        ConfigError: torch.compile may do so; the message names the setting that prevents this.
    """
    if config.dynamo_backend != "no" and config.dynamo_use_dynamic is None:
        raise ConfigError(
            "torch.compile may choose different kernels for a shape after it has seen other shapes, and the number of "
            "processes determines which shards a process computes",
            where="parity='bitwise', dynamo_backend",
            do=f"set TorchDynamoPlugin(dynamic=False) (dynamo_use_dynamic: false), {_EXACT}",
        )


def refuse_modules(models: Sequence[nn.Module]) -> None:
    """Raise if a module mixes the samples in a shard, or keeps state computed from its process's shards.

    Raises:
        UsageError: names the modules.
    """
    found = [(name, type(m).__name__, why) for model in models for name, m, why in _named_reasons(model)]
    if found:
        why = found[0][2]
        named = [f"{name or '(the model)'} ({kind})" for name, kind, reason in found if reason == why]
        raise UsageError(
            f"{', '.join(named[:5])}{' and others' if len(named) > 5 else ''}: {why}",
            where="parity='bitwise'",
            do=f"{_INSTEAD[why]}, {_EXACT}",
        )


_NORM = (
    "a BatchNorm in training mode computes its statistics over one shard, and its running statistics over one "
    "process's shards"
)
_RUNNING = "it keeps running statistics of one process's shards"
_POWER = "it runs one power iteration per forward pass, and a process with fewer shards runs fewer"
_COMPILED = "torch.compile may choose different kernels for a shape after it has seen other shapes"
_SPARSE = "its gradients are sparse, but only dense gradients can be summed in a fixed order"
_INSTEAD = {
    _NORM: "use GroupNorm or LayerNorm, or put these layers in eval mode before prepare()",
    _RUNNING: "use track_running_stats=False, or put these layers in eval mode before prepare()",
    _POWER: "use torch.nn.utils.parametrizations.weight_norm or orthogonal",
    _COMPILED: "compile with dynamic=False",
    _SPARSE: "set sparse=False",
}


def _named_reasons(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            yield name, module, _NORM
        elif isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            yield name, module, _RUNNING
        elif isinstance(module, _SpectralNorm) or any(
            isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
        ):
            yield name, module, _POWER
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield name, module, _SPARSE
        elif is_compiled_module(module) and getattr(module.dynamo_ctx, "_dynamic", False) is None:
            yield name, module, _COMPILED


def refuse_changed_buffers(models: Sequence[nn.Module], before: Mapping[int, int]) -> None:
    """Raise if a forward pass has changed a buffer, because its value then depends on the shards of its process.

    Args:
        models: the run's models.
        before: each buffer's version before that pass, by id.

    Raises:
        UsageError: names the buffers.
    """
    changed = [
        name for m in models for name, buffer in m.named_buffers() if before.get(id(buffer), 0) != buffer._version
    ]
    if changed:
        raise UsageError(
            f"the buffer{'s' if len(changed) > 1 else ''} {', '.join(changed[:5])} changed in a training forward "
            "pass, so the values depend on which shards a process computes",
            where="parity='bitwise'",
            do="make the computation stateless, freeze the buffer, keep the value in a plain attribute if nothing "
            f"depends on it, {_EXACT}",
        )


def refuse_sparse_gradients(models: Sequence[nn.Module]) -> None:
    """Raise if a backward pass has produced sparse gradients.

    Raises:
        UsageError: names the parameters.
    """
    named = [name for m in models for name, p in m.named_parameters() if p.grad is not None and p.grad.is_sparse]
    if named:
        raise UsageError(
            f"the gradients of {', '.join(named[:5])}{' and others' if len(named) > 5 else ''} are sparse, but only "
            "dense gradients can be summed in a fixed order",
            where="parity='bitwise'",
            do=f"set sparse=False, {_EXACT}",
        )


def refuse_optimizers(optimizers: Sequence[Optimizer], *, is_sharded: bool) -> None:
    """Raise if stepping a parameter's shards does not produce the same bits as stepping the whole parameter.

    Raises:
        UsageError: the bits may differ; the message names the optimizer and an alternative.
    """
    for optimizer in optimizers if is_sharded else ():
        kind = type(optimizer)
        if any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                f"{kind.__name__}(fused=True) rounds differently for different shards of a parameter, and the "
                "sharding depends on the number of processes",
                where="parity='bitwise', sharded parameters",
                do="set fused=False (transformers: optim='adamw_torch'), use the ddp or zero1 engine, " + _EXACT,
            )
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _BY_ELEMENT:
            continue
        try:
            behavior = probe_optimizer(optimizer)
        except ProbeError:
            behavior = None
        if behavior is not None and not behavior.by_tensor:
            raise UsageError(
                f"{kind.__name__} computes sums over all parameters, which round differently if they are sharded across processes",
                where="parity='bitwise', sharded parameters",
                do="use an elementwise optimizer (AdamW, SGD), or the ddp engine, " + _EXACT,
            )
        # The engine gathers the parameters of groups that are not elementwise.
        if behavior is None or any(behavior.elementwise):
            warn(
                _(
                    "parity='bitwise' holds for {kind} on sharded parameters only if it updates each element of a "
                    "parameter independently, with the same rounding at every position",
                    kind=kind.__name__,
                )
            )
