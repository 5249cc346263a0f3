"""Plain data survives JSON with its types; other data is rejected when it is saved."""

from __future__ import annotations

import copy
import datetime
import enum
import math
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from echelon.accelerator.gradient_state import GradientState
from echelon.accelerator.update.scheduler import AcceleratedScheduler
from echelon.base.errors import CheckpointError
from echelon.checkpoint.typed_json import decode, encode, from_bytes, to_bytes


def _round_trip(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = to_bytes(encode(value, name="it", put_tensor=tensors.__setitem__))
    return decode(from_bytes(text, source="the text"), source="the text", get_tensor=tensors.__getitem__)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (set, frozenset)):  # two equal ones may be iterated in other orders
        return bool(one == other and sorted(map(repr, one)) == sorted(map(repr, other)))
    if isinstance(one, complex):
        return repr(one) == repr(other)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other and repr(one) == repr(other))


VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**200),
    0.1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    math.nan,
    math.inf,
    -math.inf,
    complex(math.nan, -0.0),
    "",
    "\u20ac\U0001f600\x00\ud800",
    b"\x00\xff",
    [],
    [1, [2, [3]]],
    (),
    (1, (2,)),
    {},
    {"a": {"b": 1}},
    {1: "a", "1": "b", 1.5: "c", None: "d", (1, 2): "e", False: "f"},
    {"$tuple": [1]},
    {"$": 1, "b": 2},
    {1, 2, "x"},
    frozenset({(1, 2)}),
    Counter({30: 2, 10: 1}),
    OrderedDict([("b", 1), ("a", 2)]),
    deque([1, 2], maxlen=3),
    torch.Size([2, 3]),
    torch.float32,
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.device("cpu"),
    torch.tensor([1.5, math.nan]).nan_to_num(),
    torch.tensor(3, dtype=torch.int8),
    np.float64(0.1),
    np.float32(0.1),
    np.int64(-5),
    np.bool_(True),
    np.arange(6, dtype=">u2").reshape(2, 3),
    np.array(["ab", "c"]),
    np.array(3.5),
    np.zeros((0, 2)),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc),
    datetime.date(2026, 1, 2),
    datetime.time(1, 2, 3),
    datetime.timedelta(days=-1, microseconds=5),
    Path("a/b"),
    random.Random(5).getstate(),
    np.random.RandomState(5).get_state(),
    np.random.default_rng(5).bit_generator.state,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_survives_a_round_trip(value: Any) -> None:
    assert _same(_round_trip(value), value)
    assert _same(_round_trip([{"k": value}]), [{"k": value}])


def test_a_default_dict_keeps_its_default() -> None:
    value: defaultdict[str, list[int]] = defaultdict(list, {"a": [1]})
    back = _round_trip(value)
    assert (type(back), back.default_factory, back) == (defaultdict, list, value)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        ),
        max_leaves=20,
    )
)
def test_any_nesting_survives_a_round_trip(value: Any) -> None:
    assert _same(_round_trip(value), value)


class _Color(enum.Enum):
    RED = 1


class _Number(enum.IntEnum):
    ONE = 1


_Pair = namedtuple("_Pair", "a b")
REFUSED: list[Any] = [
    _Color.RED,
    _Number.ONE,
    _Pair(1, 2),
    object(),
    lambda: 1,
    print,
    np.array([object()]),
    np.zeros(1, dtype=[("a", "i4")]),
    defaultdict(lambda: 1),
    bytearray(b"x"),
    nn.Linear(1, 1),
    10**2000,
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_other_than_plain_data_is_rejected_with_its_location(value: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode({"a": [0, {1: value}]}, name="scheduler")
    assert "scheduler['a'][1][1] is a " in str(caught.value)
    assert "do:    save numbers, strings" in str(caught.value)


def test_a_structure_that_contains_itself_is_rejected() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="nested deeper than 64 levels or contains itself"):
        encode(value, name="it")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a":1,"a":2}', "the key 'a' occurs twice"),
        (b'{"x":{"b":{"a":1,"a":2}}}', "the key 'a' occurs twice"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"[NaN]", "NaN is not valid JSON"),
        (b"[Infinity]", "Infinity is not valid JSON"),
        (b"[1", "delimiter"),
        (b"\xff", "utf-8"),
        (b'{"$nothing":1}', r"unknown type '\$nothing'"),
        (b'{"$tuple":[],"b":1}', r"'\$tuple' must be the only key"),
        (b'{"$array":["O",[1],""]}', "'O' is not a dtype that plain data can have"),
        (b'{"$array":["<f8",[4611686018427387904,4],""]}', "cannot be read"),
        (b'{"$array":["<U99999999",[1],"AAAA"]}', "cannot be read"),
        (b'{"$set":[[1]]}', "unhashable"),
        (b'{"$dict":[[[1],2]]}', "unhashable"),
        (b'{"$torch_dtype":"load"}', "'load' is not a dtype"),
        (b'{"$torch_dtype":"__builtins__"}', "is not a dtype"),
        (b'{"$default_dict":["eval",{}]}', "eval"),
        (b'{"$tensor":"w"}', "it refers to a tensor in a place where tensors are not allowed"),
        (b'{"$bytes":"*"}', "base64"),
        (b'{"$float":"1.0"}', "expected nan, inf or -inf"),
        (b'{"$timedelta":[1e308,0,0]}', "cannot be read"),
        (b'{"$device":"evil:0"}', "is not a device"),
        (b"1" * 10_000, "digits"),
    ],
    ids=lambda value: value[:24].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_malicious_text_is_rejected(text: bytes, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        decode(from_bytes(text, source="the text"), source="the text")


def _optimizers() -> list[type[torch.optim.Optimizer]]:
    found = [getattr(torch.optim, name) for name in dir(torch.optim)]
    base = torch.optim.Optimizer
    return [one for one in found if isinstance(one, type) and issubclass(one, base) and one is not base]


@pytest.mark.parametrize("kind", _optimizers(), ids=lambda kind: kind.__name__)
def test_the_state_of_every_optimizer_survives_a_round_trip(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(4, 3, sparse=True) if kind is torch.optim.SparseAdam else nn.Linear(4, 3, bias=False)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    x = torch.tensor([1, 2]) if kind is torch.optim.SparseAdam else torch.randn(2, 4)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(loss)
    state = optimizer.state_dict()
    assert state["state"]
    assert _same(_round_trip(state), state)


def _schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    s = torch.optim.lr_scheduler
    return [
        s.LambdaLR(optimizer, lambda step: 0.9**step),
        s.MultiplicativeLR(optimizer, lambda step: 0.9),
        s.StepLR(optimizer, 2),
        s.MultiStepLR(optimizer, [1, 3, 3]),
        s.ConstantLR(optimizer),
        s.LinearLR(optimizer),
        s.ExponentialLR(optimizer, 0.9),
        s.PolynomialLR(optimizer),
        s.CosineAnnealingLR(optimizer, 5),
        s.CosineAnnealingWarmRestarts(optimizer, 2),
        s.ReduceLROnPlateau(optimizer),
        s.CyclicLR(optimizer, 0.1, 0.2),
        s.OneCycleLR(optimizer, 0.2, total_steps=10),
        s.SequentialLR(optimizer, [s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)], [2]),
        s.ChainedScheduler([s.ConstantLR(optimizer), s.ExponentialLR(optimizer, 0.9)]),
        torch.optim.swa_utils.SWALR(optimizer, 0.05),
    ]


def test_the_state_of_every_scheduler_survives_a_round_trip() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        for scheduler in _schedulers(optimizer):
            optimizer.step()
            scheduler.step(*([0.5] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            prepared = AcceleratedScheduler(scheduler, [], gradient_state=GradientState(), num_processes=1)
            state = copy.copy(prepared.state_dict())
            assert _same(_round_trip(state), state), type(scheduler)
