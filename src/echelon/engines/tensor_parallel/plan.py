"""Finds the style of each module: patterns of the model's own plan and of the user's, and checks of the sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_
from echelon.engines.state_dicts import plain_name
from echelon.engines.tensor_parallel.styles import REFUSED, STYLES, split_dim, style_of_name

_logger = get_logger(__name__)
_WHERE = "ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan=))"
_KEY_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "q", "k", "v", "query", "key", "value"})


def resolve_plan(
    model: nn.Module, given: Mapping[str, Any], *, tp_size: int, num_chunks: int | None = None
) -> dict[str, ParallelStyle]:
    """Return the style of each module that is split, by module name.

    The user's patterns take precedence over the model's, and in each plan later ones over earlier ones. A pattern is a module
    name in which each part between dots may have wildcards: ``layers.*.mlp.up``.

    Args:
        model: the model.
        given: styles of torch (``ColwiseParallel()``) or names (``"colwise"``) by pattern.
        tp_size: number of ranks that share each layer.
        num_chunks: number of canonical chunks, by which sizes must be divisible. None: ``tp_size``.

    Raises:
        ConfigError: there is no plan, a pattern matches nothing, a style is unknown or not supported, or a size is not divisible.
    """
    parts = _Parts(tp_size=tp_size, num_chunks=num_chunks)
    own = model_plan(model)
    if not own and not given:
        raise ConfigError(
            f"{type(model).__name__} has no plan for tensor parallelism (a tp_plan, as transformers' models have)",
            where=f"prepare(), {parts.setting}",
            do="pass ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan={'layers.*.up': 'colwise', "
            f"'layers.*.down': 'rowwise'}})), or {parts.instead}",
        )
    modules = {plain_name(name): (name, module) for name, module in model.named_modules()}
    found: dict[str, tuple[nn.Module, Any]] = {}
    for plan, is_given in ((own, False), (given, True)):
        for pattern, style in plan.items():
            matched = [name for name in modules if matches_pattern(name, pattern)]
            if not matched:
                _check_unmatched(model, pattern, style, is_strict=is_given)
            for name in matched:
                found[name] = (modules[name][1], style)
    styles = {name: (module, _build(name, module, style)) for name, (module, style) in found.items()}
    split = {name: (module, style) for name, (module, style) in styles.items() if style is not None}
    for name, (module, style) in split.items():
        _check_sizes(name, module, style, parts)
    _check_heads(model, split, parts)
    _add_tied(modules, split, parts)
    _log_whole(modules, set(split))
    return {modules[name][0]: style for name, (_, style) in split.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The number of parts into which a dimension is split, in the words of errors."""

    tp_size: int
    num_chunks: int | None

    @property
    def count(self) -> int:
        return self.num_chunks or self.tp_size

    @property
    def setting(self) -> str:
        return f"canonical_chunks={self.num_chunks}" if self.num_chunks else f"tp_size={self.tp_size}"

    @property
    def split(self) -> str:
        if self.num_chunks:
            return f"divided into canonical_chunks={self.num_chunks} parts (parity='bitwise')"
        return f"split over tp_size={self.tp_size} ranks"

    @property
    def choose(self) -> str:
        if self.num_chunks:
            return "set TorchTensorParallelConfig(canonical_chunks=) to a power of two that divides it"
        return "choose a divisor as tp_size"

    @property
    def instead(self) -> str:
        return "remove tp_handler" if self.tp_size == 1 else "set tp_size=1"


def model_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that ``model`` or the outermost modules in it have (``_tp_plan`` of transformers' models)."""
    found: dict[str, str] = {}
    owners: list[str] = []
    for name, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)  # transformers' models; others have no such attribute
        if not isinstance(plan, Mapping) or not plan or any(name.startswith(owner) for owner in owners):
            continue
        prefix = f"{plain_name(name)}." if name else ""
        owners.append(f"{name}." if name else "")
        found.update({prefix + pattern: style for pattern, style in plan.items()})
    return found


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a pattern of a plan matches the name of a module."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_unmatched(model: nn.Module, pattern: str, style: Any, *, is_strict: bool) -> None:
    """Raise ConfigError if a pattern must match a module, or matches a parameter. A model's own plan may name modules that this
    configuration lacks.
    """
    names = [plain_name(name) for name, _ in model.named_parameters()]
    parameter = next((name for name in names if matches_pattern(name, pattern)), None)
    if parameter is not None:
        raise _refused(parameter, style)
    if not is_strict:
        return
    known = sorted(
        {re.sub(r"\d+", "*", n) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    )
    raise ConfigError(
        f"the pattern {pattern!r} of the plan matches no module of {type(model).__name__}",
        where=_WHERE,
        do=f"use patterns of its modules, such as {', '.join(known[:4])}",
    )


def _refused(name: str, style: Any) -> ConfigError:
    why = REFUSED.get(style) if isinstance(style, str) else None
    known = why is not None
    return ConfigError(
        f"{name} has the style {style!r} in the plan for tensor parallelism, which is not supported"
        + (f": {why}" if known else ""),
        where="prepare(), tp_size",
        do=f"set {name!r}: 'replicate' in TorchTensorParallelConfig(plan=) to keep it whole on every rank, or set tp_size=1"
        if known
        else f"use a style of torch.distributed.tensor.parallel or one of {', '.join(STYLES)}",
    )


def _build(name: str, module: nn.Module, style: Any) -> ParallelStyle | None:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise _refused(name, style)
    built = style_of_name(style)
    if built is not None and split_dim(built, module) is not None and not isinstance(module, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"{name} is a {type(module).__name__}, but the style {style!r} splits only Linear and Embedding",
            where="prepare(), tp_size",
            do=f"set {name!r}: 'replicate' in TorchTensorParallelConfig(plan=), or set tp_size=1",
        )
    if isinstance(built, RowwiseParallel) and isinstance(module, nn.Embedding):
        return style_of_name("embedding_rowwise")  # "rowwise", in older plans, takes split inputs
    return built


def _check_sizes(name: str, module: nn.Module, style: ParallelStyle, parts: _Parts) -> None:
    dim = split_dim(style, module)
    if dim is None or not isinstance(module, nn.Linear | nn.Embedding):
        return
    attribute = ("in_features" if dim else "out_features") if isinstance(module, nn.Linear) else ""
    attribute = attribute or ("embedding_dim" if dim else "num_embeddings")
    size = module.weight.shape[dim]
    if size % parts.count:
        pad = ", pad the vocabulary (resize_token_embeddings(pad_to_multiple_of=))" if size > 1000 else ""
        raise ConfigError(
            f"{name} has {attribute}={size}, which cannot be {parts.split}",
            where="prepare(), tp_size",
            do=f"{parts.choose}{pad}, or set {name!r}: 'replicate' in TorchTensorParallelConfig(plan=)",
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        option = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
        raise ConfigError(
            f"{name} is an embedding with {option}, which a rank cannot compute from its part of the vocabulary",
            where="prepare(), tp_size",
            do=f"remove {option}, or set {name!r}: 'replicate' in TorchTensorParallelConfig(plan=)",
        )


def _check_heads(model: nn.Module, split: Mapping[str, Any], parts: _Parts) -> None:
    """Raise ConfigError if attention projections are split, and the numbers of heads in the model's config do not allow it."""
    if not any(name.rsplit(".", 1)[-1] in _KEY_PROJECTIONS for name in split):
        return
    for config in model_configs(model):
        for attribute in ("num_key_value_heads", "num_attention_heads"):
            num_heads = getattr(config, attribute, None)
            if isinstance(num_heads, int) and num_heads % parts.count:
                raise ConfigError(
                    f"{type(model).__name__} has {attribute}={num_heads}, which cannot be {parts.split}",
                    where="prepare(), tp_size",
                    do=f"{parts.choose}, and shard the rest with dp_shard_size",
                )


def model_configs(model: nn.Module) -> Iterator[Any]:
    """Yield the settings of transformers' models in ``model``; those of models with several parts are in their text part."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            text = getattr(config, "get_text_config", None)
            yield config if text is None else text()
            return


def _add_tied(modules: Mapping[str, tuple[str, nn.Module]], split: dict[str, Any], parts: _Parts) -> None:
    """Give modules that share a split weight a style that splits it in the same way."""
    owners: dict[int, list[str]] = {}
    for name, (_, module) in modules.items():
        if isinstance(module, nn.Linear | nn.Embedding):
            owners.setdefault(id(module.weight), []).append(name)
    for names in owners.values():
        styled = [name for name in names if name in split]
        if len(names) < 2 or not styled:
            continue
        dims = {split_dim(split[name][1], modules[name][1]) for name in styled}
        if len(dims) > 1:
            raise ConfigError(
                f"{' and '.join(styled)} share one weight, but the plan splits it along different dimensions",
                where="prepare(), tp_size",
                do="use styles that split the same dimension, such as 'embedding_rowwise' and 'colwise_gather_output'",
            )
        by_row = dims == {0}
        for name in names:
            module = modules[name][1]
            if name in split:
                continue
            if isinstance(module, nn.Embedding):
                style = style_of_name("embedding_rowwise" if by_row else "embedding_colwise")
            else:
                style = style_of_name("colwise_gather_output" if by_row else "rowwise_split_input")
            assert style is not None
            _check_sizes(name, module, style, parts)
            split[name] = (module, style)


def _log_whole(modules: Mapping[str, tuple[str, nn.Module]], split: set[str]) -> None:
    """Log which layers no pattern matches: every rank holds and computes them whole."""
    whole = [name for name, (_, m) in modules.items() if isinstance(m, nn.Linear | nn.Embedding) and name not in split]
    if whole:
        shown = sorted({re.sub(r"\d+", "*", name) for name in whole})
        _logger.warning(
            N_("tensor parallelism: no pattern of the plan matches %s: every rank holds them whole"), ", ".join(shown)
        )
