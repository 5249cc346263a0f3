"""Cuts a model into stages that compute it one after the other, without renaming a parameter."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from echelon.base.errors import ConfigError

_WHERE = "prepare_pipeline(stages=)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """Which modules each stage computes, in the order of the stages."""

    stages: tuple[tuple[str, ...], ...]
    """Full names of the modules of each stage."""
    kind: str
    """``sequential``: the modules of an ``nn.Sequential``. ``decoder``: a transformers decoder, whose own forward runs in each
    stage. ``chain``: each module is called with the output of the one before it."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)


class Absent(nn.Module):
    """Stands in for a module of another stage, and returns its first argument."""

    def forward(self, first: Any = None, *_rest: Any, **more: Any) -> Any:
        """Return ``first``."""
        return next(iter(more.values())) if first is None and more else first


class _ChainStage(nn.Module):
    """Calls modules one after the other; a tuple of outputs becomes the arguments of the next one."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(modules)

    def forward(self, *inputs: Any) -> Any:
        values: Any = inputs
        for module in self.chain:
            values = module(*values) if isinstance(values, tuple) else module(values)
        return values


class _DecoderStage(nn.Module):
    """Runs the forward of a transformers decoder from token ids or hidden states; returns hidden states or logits."""

    def __init__(self, decoder: nn.Module, *, is_first: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self._name = "input_ids" if is_first else "inputs_embeds"

    def forward(self, values: torch.Tensor, **arguments: Any) -> torch.Tensor:
        out = self.decoder(**{self._name: values}, **arguments, use_cache=False, return_dict=True)
        logits: torch.Tensor = out.logits
        return logits


# ---- where to cut ----------------------------------------------------------------------------------------------------


def cut_model(model: nn.Module, num_stages: int, *, stages: Sequence[Sequence[str]] | str | None = None) -> StageCut:
    """Return the modules of ``num_stages`` stages.

    Args:
        model: an ``nn.Sequential``, a transformers decoder (``model.embed_tokens``, ``model.layers``, ``model.norm`` and
            ``lm_head``), or any other model if ``stages`` lists its modules.
        num_stages: the number of stages.
        stages: the names of each stage's modules, in the order of computation; ``parameters`` or ``layers`` balances their
            numbers. None: ``parameters``.

    Raises:
        ConfigError: the model cannot be cut by rule, or ``stages`` does not name each parameter's module once.
    """
    kind, pieces = pieces_of(model)
    if stages is None or isinstance(stages, str):
        if stages not in (None, "parameters", "layers"):
            raise ConfigError(
                f"stages={stages!r} is unknown", where=_WHERE, do="use 'parameters', 'layers', or lists of names"
            )
        if not pieces:
            raise ConfigError(
                f"{type(model).__name__} is neither an nn.Sequential nor a transformers decoder, so there is no rule for its stages",
                where=_WHERE,
                do="pass the names of each stage's modules: stages=[['embed', 'blocks.0'], ['blocks.1', 'head']]",
            )
        if len(pieces) < num_stages:
            raise ConfigError(
                f"{type(model).__name__} has {len(pieces)} parts, which is less than {num_stages} stages",
                where=_WHERE,
                do="use fewer ranks on the axis pp, or a schedule with one stage per rank ('1F1B')",
            )
        modules = dict(model.named_modules())
        sizes = [sum(_size(modules[name], stages == "layers") for name in piece) for piece in pieces]
        groups = balanced_ranges(sizes, num_stages)
        return StageCut(stages=tuple(tuple(n for p in pieces[a:b] for n in p) for a, b in groups), kind=kind)
    given = tuple(tuple(names) for names in stages)
    if len(given) != num_stages:
        raise ConfigError(
            f"{len(given)} stages are given, but the schedule has {num_stages}", where=_WHERE, do=f"give {num_stages}"
        )
    _check_names(model, given)
    if kind == "chain":
        return StageCut(stages=given, kind=kind)
    expected = [name for piece in pieces for name in piece]
    if [name for names in given for name in names] != expected:
        raise ConfigError(
            f"the stages of {type(model).__name__} must list {', '.join(expected)} in this order",
            where=_WHERE,
            do="give all of these names, in this order",
        )
    return StageCut(stages=given, kind=kind)


def cut_before(model: nn.Module, points: Sequence[str], *, num_stages: int) -> StageCut:
    """Return the stages that begin with the modules ``points``; the first one begins with the model.

    Raises:
        ConfigError: there is no rule for the model, or ``points`` are not beginnings of ``num_stages`` stages in their order.
    """
    kind, pieces = pieces_of(model)
    starts = [next((n for n, names in enumerate(pieces) if point in names), -1) for point in points]
    bounds = [0, *starts, len(pieces)]
    if len(points) + 1 != num_stages or any(a >= b for a, b in pairwise(bounds)):
        known = (
            ", ".join(names[0] for names in pieces[1:4])
            or "none, because it is no nn.Sequential and no transformers decoder"
        )
        raise ConfigError(
            f"{list(points)} are not the beginnings of stages 2 to {num_stages} of {type(model).__name__}",
            where="split_points",
            do=f"give {num_stages - 1} names in the order of computation, such as {known}",
        )
    return StageCut(stages=tuple(tuple(n for p in pieces[a:b] for n in p) for a, b in pairwise(bounds)), kind=kind)


def _size(module: nn.Module, by_layers: bool) -> int:
    return 1 if by_layers else 1 + sum(p.numel() for p in module.parameters())


def pieces_of(model: nn.Module) -> tuple[str, list[tuple[str, ...]]]:
    """Return the kind of ``model`` and the names of the modules that a stage can begin with, each with those that must follow it."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return "sequential", [(name,) for name, _ in model.named_children()]
    decoder = getattr(model, "model", None)
    layers = getattr(decoder, "layers", None)
    parts = [getattr(decoder, name, None) for name in ("embed_tokens", "norm")]
    is_decoder = isinstance(layers, nn.ModuleList) and all(isinstance(part, nn.Module) for part in parts)
    if is_decoder and hasattr(model, "config") and isinstance(getattr(model, "lm_head", None), nn.Module):
        assert isinstance(layers, nn.ModuleList)
        blocks: list[tuple[str, ...]] = [(f"model.layers.{number}",) for number in range(len(layers))]
        blocks[0] = ("model.embed_tokens", *blocks[0])
        blocks[-1] = (*blocks[-1], "model.norm", "lm_head")
        return "decoder", blocks
    return "chain", []


def _check_names(model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
    names = [name for stage in stages for name in stage]
    modules = dict(model.named_modules())
    if unknown := [name for name in names if name not in modules or not name]:
        raise ConfigError(
            f"{type(model).__name__} has no module {unknown[0]!r}",
            where=_WHERE,
            do="use names of model.named_modules()",
        )
    if not all(stages):
        raise ConfigError("a stage has no modules", where=_WHERE, do="give each stage at least one")
    for number, name in enumerate(names):
        for other in names[:number]:
            if name == other or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise ConfigError(f"{other!r} and {name!r} overlap", where=_WHERE, do="list each module once")
    covered = tuple(f"{name}." for name in names)
    own = [name for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]]
    if missing := [name for name in own if not name.startswith(covered)]:
        raise ConfigError(
            f"{missing[0]!r} of {type(model).__name__} is in no stage", where=_WHERE, do="list its module in a stage"
        )


def balanced_ranges(sizes: Sequence[int], num_groups: int) -> list[tuple[int, int]]:
    """Return ``num_groups`` consecutive, nonempty ranges of ``sizes`` whose largest sum is as small as possible."""
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    count = len(sizes)
    # best[g][n]: the smallest largest sum of the first n sizes in g groups, and where the last group begins.
    best = [[(0, 0)] + [(sums[-1] + 1, 0)] * count]
    for groups in range(1, num_groups + 1):
        row = [(sums[-1] + 1, 0)] * (count + 1)
        for end in range(groups, count + 1):
            row[end] = min(
                (max(best[-1][begin][0], sums[end] - sums[begin]), begin) for begin in range(groups - 1, end)
            )
        best.append(row)
    found, end = [], count
    for groups in range(num_groups, 0, -1):
        begin = best[groups][end][1]
        found.append((begin, end))
        end = begin
    return found[::-1]


# ---- stages as modules -----------------------------------------------------------------------------------------------


def stage_view(model: nn.Module, cut: StageCut, number: int) -> nn.Module:
    """Return a module that computes stage ``number`` with the modules of ``model``, which it shares."""
    modules = dict(model.named_modules())
    if cut.kind == "chain":
        return _ChainStage([modules[name] for name in cut.stages[number]])
    others = {name for other, names in enumerate(cut.stages) if other != number for name in names}
    view = _copy_without(model, "", others)
    return _DecoderStage(view, is_first=number == 0) if cut.kind == "decoder" else view


def _copy_without(module: nn.Module, prefix: str, absent: Collection[str]) -> nn.Module:
    """Return a copy of the modules that contain modules named in ``absent``, which are replaced; it shares all others."""
    view = copy.copy(module)
    # Hooks of the model must not run for each stage, and later hooks of the stage not for the model.
    vars(view).update({name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")})
    children: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        if path in absent:
            children[name] = Absent()
        elif child is not None and any(other.startswith(f"{path}.") for other in absent):
            children[name] = _copy_without(child, f"{path}.", absent)
        else:
            children[name] = child
    vars(view)["_modules"] = children
    return view


def copied_containers(model: nn.Module, view: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the modules that ``stage_view`` copied, each with the module of ``model``."""
    own = view.decoder if isinstance(view, _DecoderStage) else view
    if isinstance(own, _ChainStage):
        return
    originals = dict(model.named_modules())
    for name, module in own.named_modules():
        if not isinstance(module, Absent) and module is not originals[name]:
            yield module, originals[name]


def remove_modules(model: nn.Module, names: Collection[str]) -> None:
    """Replace the modules with these full names, so that their parameters can be freed."""
    for name in names:
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = Absent()


def tied_names(model: nn.Module, cut: StageCut) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages share: the first full name, and the stages that have it."""
    owners: dict[int, dict[int, None]] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for number in _stages_of(name, cut.stages):
            owners.setdefault(id(parameter), {})[number] = None
            first.setdefault(id(parameter), name)
    return {first[key]: tuple(numbers) for key, numbers in owners.items() if len(numbers) > 1}


def _stages_of(name: str, stages: Sequence[Sequence[str]]) -> Iterator[int]:
    for number, names in enumerate(stages):
        if name.startswith(tuple(f"{one}." for one in names)):
            yield number


def check_decoder(model: nn.Module, views: Mapping[int, nn.Module]) -> None:
    """Compare the stages of a transformers decoder with the decoder itself, for four tokens.

    Raises:
        ConfigError: the model computes something between its layers that the stages would repeat.
    """
    parameter = next(model.parameters())
    if parameter.is_meta:
        return
    modes = [(module, module.training) for root in (model, *views.values()) for module in root.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            tokens = torch.arange(4, device=parameter.device)[None]
            expected = model(input_ids=tokens, use_cache=False, return_dict=True).logits
            values: Any = tokens
            for number in sorted(views):
                values = views[number](values)
    finally:
        for module, is_training in modes:
            module.training = is_training
    if values.shape != expected.shape or not torch.allclose(
        values, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    ):
        raise ConfigError(
            f"the stages of {type(model).__name__} do not compute the same as the model, because its forward changes the hidden states "
            "outside its layers",
            where=_WHERE,
            do="list the modules of each stage if the model is a chain of modules; else use dp_shard_size or tp_size",
        )


# ---- stages whose layers are split over further ranks ----------------------------------------------------------------


def require_whole_boundaries(cut: StageCut, plan: Mapping[str, ParallelStyle]) -> None:
    """Check that each rank has the whole of what stages send to each other and of the last one's outputs.

    Args:
        cut: the modules of each stage.
        plan: the style of each module that is split.

    Raises:
        ConfigError: activations are split where a stage ends.
    """
    for name, style in plan.items():
        if isinstance(style, SequenceParallel) or not getattr(style, "use_local_output", True):
            raise ConfigError(
                f"{name} has the style {type(style).__name__} that leaves activations split (sequence parallelism or loss_parallel), "
                "but stages send each other whole ones",
                where="prepare_pipeline(), tp_size with pp_size",
                do="use 'colwise' and 'rowwise' styles with whole activations between them ('colwise_gather_output' for the head)",
            )
    for names in cut.stages:
        opened = None
        for name in names:
            found = plan.get(name)
            if isinstance(found, RowwiseParallel) and found.input_layouts == (Shard(-1),):
                if opened is None:
                    raise _refused(name)
                opened = None
            elif isinstance(found, ColwiseParallel) and found.output_layouts == (Shard(-1),):
                opened = name
        if opened is not None:
            raise _refused(opened)


def _refused(name: str) -> ConfigError:
    return ConfigError(
        f"a stage ends between {name!r}, whose features are split over the ranks of tp, and the layer that adds the parts again",
        where="prepare_pipeline(stages=)",
        do="put both layers in one stage",
    )
