"""Activations between a layer with split output and one with split input, as a tensor in canonical chunks.

Kernels round differently for tensors of different shapes (vector instructions and the rest of a row, blocks of a matrix product), so
what a rank computes from its part of the heads or features would depend on the number of ranks. A ``ChunkedTensor`` therefore applies
each operation to one chunk after the other: the code of a model sees the shape of one chunk, as it would with one rank for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function

from echelon.base.errors import UsageError
from echelon.data.rng.per_sample_rng import key_of
from echelon.engines.tensor_parallel.canonical_chunks import CanonicalChunks

_WHERE = "parity='bitwise', activations of split layers"
_EXACT = "or use parity='exact'"
# Functions whose result depends on the values of one chunk, where the code would go on differently on each rank.
_VALUES = ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "backward")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_PYTHON = ("bool", "int", "float", "index", "complex", "array", "contains", "dlpack", "reduce_ex", "deepcopy", "format")
_READS = frozenset((*_VALUES, *_HOOKS, *(f"__{name}__" for name in _PYTHON)))
# Functions that draw random numbers; the first ones also exist with an underscore.
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "rrelu_with_noise")
_DISTRIBUTIONS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
_LIKE = ("rand_like", "randint_like", "randn_like", "binomial", "multinomial", "poisson", "gumbel_softmax")
_LAYERS = ("dropout1d", "dropout2d", "dropout3d", "native_dropout", "fractional_max_pool2d", "fractional_max_pool3d")
_BLOCKS = ("scaled_dot_product_attention", "multi_head_attention_forward", "gru", "lstm", "rnn_relu", "rnn_tanh")
_BOTH = (*_DROPOUTS, *_DISTRIBUTIONS)
RANDOM = frozenset((*_BOTH, *(f"{name}_" for name in _BOTH), *_LIKE, *_LAYERS, *_BLOCKS))
"""Functions that draw random numbers: each chunk draws its own, on any number of ranks."""
_HEADS = (
    "if the activation is divided into heads, set TorchTensorParallelConfig(canonical_chunks=) to a power of two that divides the number "
    "of heads and of key-value heads"
)
# What to do if a function does not fit the shape of one chunk.
_REMEDIES = {
    **dict.fromkeys(("view", "reshape", "unflatten", "view_as", "reshape_as", "expand"), _HEADS),
    "linear": "give the layer that takes this activation the style 'rowwise' in TorchTensorParallelConfig(plan=)",
}
_OPERATORS = ("add", "and", "floordiv", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
_IN_PLACE = frozenset(f"__i{operator}__" for operator in _OPERATORS)


class ChunkedTensor(torch.Tensor):
    """The own chunks of an activation, under the shape of one chunk.

    Functions of torch are applied to each chunk. A tensor that is not split takes part in the operation of each chunk; its gradient is
    the sum over the chunks of all ranks, in the fixed order.
    """

    _chunks: tuple[torch.Tensor, ...]
    _layout: CanonicalChunks

    @staticmethod
    def __new__(cls, chunks: Sequence[torch.Tensor], layout: CanonicalChunks) -> ChunkedTensor:
        """Return a tensor with one entry of ``chunks`` for each own chunk of ``layout``."""
        assert len(chunks) == layout.num_own, (len(chunks), layout.num_own)
        first = chunks[0]
        # As a tensor that requires grad, it gets a grad_fn from custom autograd functions, which would cut the graph of the chunks.
        requires_grad = torch.is_grad_enabled() and any(chunk.requires_grad for chunk in chunks)
        found: ChunkedTensor = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, dtype=first.dtype, device=first.device, requires_grad=requires_grad
        )
        found._chunks, found._layout = tuple(chunks), layout
        return found

    @property
    def chunks(self) -> tuple[torch.Tensor, ...]:
        """One tensor for each own chunk.

        Raises:
            UsageError: a custom autograd function has computed this tensor.
        """
        with torch._C.DisableTorchFunctionSubclass():
            function = self.grad_fn
        if function is not None:
            raise UsageError(
                f"{type(function).__name__} is a custom autograd function, which cannot be applied to the chunks of an activation",
                where=_WHERE,
                do=f"use functions of torch between split layers (for attention, attn_implementation='sdpa'), {_EXACT}",
            )
        return self._chunks

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        found = next(_chunked([*args, *kwargs.values()]))
        if name == "__hash__":
            return id(found)
        if name == "__repr__":
            return f"ChunkedTensor({found._layout.num_chunks} chunks, own: {found.chunks})"
        if name in _READS:
            raise UsageError(
                f"{name.strip('_')}() reads values of an activation that is divided into {found._layout.num_chunks} chunks, which differ",
                where=_WHERE,
                do="use the activation behind the layer that adds the parts again (rowwise) or gathers them "
                f"(colwise_gather_output), {_EXACT}",
            )
        if name == "__iter__":
            return iter(torch.unbind(found))
        _refuse_whole_results(name, args, kwargs)
        if torch.is_grad_enabled():
            args, kwargs = _spread(args, found._layout), _spread(kwargs, found._layout)
        is_random = name in RANDOM and not _keeps_everything(name, args, kwargs)
        calls = ((_of_chunk(args, i), _of_chunk(kwargs, i)) for i in range(found._layout.num_own))
        results = []
        with _rng_by_chunk(found) if is_random else _nothing() as seed:
            for number, (own_args, own_kwargs) in zip(found._layout.own, calls):
                seed(number)
                results.append(_call(func, name, own_args, own_kwargs, found._layout))
        return _merge(results, name, found._layout)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UsageError(
            f"{func} cannot be applied to an activation that is divided into chunks",
            where=_WHERE,
            do=f"use functions of torch between split layers (for attention, attn_implementation='sdpa'), {_EXACT}",
        )


def _call(func: Callable[..., Any], name: str, args: Any, kwargs: Any, layout: CanonicalChunks) -> Any:
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if name not in _REMEDIES:
            raise
        raise UsageError(
            f"{name}() failed on one of the {layout.num_chunks} chunks of an activation: {error}",
            where=_WHERE,
            do=_REMEDIES[name],
        ) from error


def _chunked(values: Any) -> Iterator[ChunkedTensor]:
    for value in values:
        if isinstance(value, ChunkedTensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _chunked(value)
        elif isinstance(value, dict):
            yield from _chunked(value.values())


class _Spread:
    """A tensor that is not split, once for each own chunk."""

    __slots__ = ("aliases",)

    def __init__(self, aliases: Sequence[torch.Tensor]) -> None:
        self.aliases = aliases


def _spread(values: Any, layout: CanonicalChunks) -> Any:
    """Replace tensors that require grad and are not split."""
    if isinstance(values, torch.Tensor):
        if isinstance(values, ChunkedTensor) or not values.requires_grad:
            return values
        spread: Any = _SpreadOverChunks.apply  # untyped
        return _Spread(spread(layout, values))
    if isinstance(values, dict):
        return {key: _spread(value, layout) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_spread(value, layout) for value in values)
    return values


def _of_chunk(values: Any, own: int) -> Any:
    """Return the arguments of one chunk, by its number among the own ones."""
    if isinstance(values, ChunkedTensor):
        return values.chunks[own]
    if isinstance(values, _Spread):
        return values.aliases[own]
    if isinstance(values, dict):
        return {key: _of_chunk(value, own) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_of_chunk(value, own) for value in values)
    return values


class _SpreadOverChunks(Function):
    """Gives each own chunk the same tensor; the gradient is the sum over the chunks of all ranks."""

    @staticmethod
    def forward(context: Any, layout: CanonicalChunks, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context.layout = layout
        return tuple(whole.view_as(whole) for _ in layout.own)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        layout: CanonicalChunks = context.layout
        return None, layout.sum(gradients)


def _refuse_whole_results(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise UsageError if the function writes into a tensor that is not split: each chunk would write its own values."""
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__")) or name in _IN_PLACE
    target = args[0] if is_in_place and args else kwargs.get("out")
    if isinstance(target, torch.Tensor) and not isinstance(target, ChunkedTensor):
        raise UsageError(
            f"{name}() writes an activation that is divided into chunks into a tensor that is not",
            where=_WHERE,
            do=f"compute a new tensor instead, {_EXACT}",
        )


def _keeps_everything(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function with dropout drops nothing here."""
    if name == "scaled_dot_product_attention":
        return not (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if "dropout" not in name:
        return False
    trains = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return not trains


@contextmanager
def _nothing() -> Iterator[Callable[[int], None]]:
    yield lambda _number: None


@contextmanager
def _rng_by_chunk(found: ChunkedTensor) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds the generators for a chunk. The seeds follow from the state that all ranks share.

    Afterwards the shared state continues behind one draw, whatever the chunks have drawn. Nothing is kept between calls, so that
    activation checkpointing, which restores the shared state, recomputes the same masks.
    """
    device = found.device
    key = int(torch.randint(2**62, (), device="cpu"))  # on the CPU: no wait for the device
    generators: list[Any] = [torch.default_generator]
    if device.type not in ("cpu", "meta"):
        own: Any = torch.get_device_module(device)
        generators.append(own.default_generators[own.current_device()])
    kept = [generator.get_state() for generator in generators]

    def seed(number: int) -> None:
        for generator in generators:
            generator.manual_seed(key_of(key, number) >> 1)

    try:
        yield seed
    finally:
        for generator, state in zip(generators, kept):
            generator.set_state(state)


def _merge(results: list[Any], name: str, layout: CanonicalChunks) -> Any:
    """Return the results of the own chunks as one result."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        if any(other.shape != first.shape for other in results):
            raise _differ(name, layout)
        return ChunkedTensor(results, layout)
    if isinstance(first, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in first):
        merged = [_merge(list(parts), name, layout) for parts in zip(*results)]
        return type(first)(*merged) if hasattr(first, "_fields") else type(first)(merged)
    if any(type(other) is not type(first) or other != first for other in results[1:]):
        raise _differ(name, layout)
    return first


def _differ(name: str, layout: CanonicalChunks) -> UsageError:
    return UsageError(
        f"{name}() gives results of different kinds for the {layout.num_chunks} chunks of an activation",
        where=_WHERE,
        do=f"use functions whose result has the same shape for all values, {_EXACT}",
    )
