"""Sketches add up over shards and estimate the norm of a difference."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.distributed.checks import sketch
from echelon.distributed.checks.sketch import NUM_BUCKETS, LatestSketches, Sketch, Sketches, sketch_of, sketches_of
from echelon.verify.trace import Batch, Forward, Row, SketchedTensors, TraceWriter, read_trace

SHAPE = (300, 371)


def _assert_equal(one: Sketch, other: Sketch) -> None:
    assert (one.bits, one.num_elements, one.num_nonfinite) == (other.bits, other.num_elements, other.num_nonfinite)
    # Both sum the same float64 numbers in another order: the error of a sum of 20,000 numbers is about 1e-12.
    np.testing.assert_allclose(one.projection, other.projection, rtol=1e-10, atol=1e-10)
    assert one.square_sum == pytest.approx(other.square_sum, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("cuts", [(0, 100, 300), (0, 1, 150, 299, 300), (0, 0, 300), (0, 91, 300)])
def test_sketches_of_row_shards_add_up(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = torch.randn(SHAPE, dtype=dtype)
    numbers = SHAPE[1] * (2 if dtype.is_complex else 1)
    parts = [sketch_of(whole[a:b], offset=a * numbers) for a, b in pairwise(cuts)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    _assert_equal(total, sketch_of(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sketches_of_column_shards_add_up(dtype: torch.dtype) -> None:
    whole, index = torch.randn(SHAPE, dtype=dtype), np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    first, second = (
        sketch_of(whole[:, part], offset=index[:, part].reshape(-1)) for part in (slice(0, 5), slice(5, None))
    )
    _assert_equal(first + second, sketch_of(whole))


def test_small_shards_far_into_a_tensor_add_up() -> None:
    whole = torch.randn(100_000)
    parts = [sketch_of(whole[a : a + 1000], offset=a) for a in range(0, 100_000, 1000)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    _assert_equal(total, sketch_of(whole))


@pytest.mark.parametrize(
    ("values", "first"),
    [
        (torch.randn(700_001), 0),
        (torch.randn(300_000, dtype=torch.bfloat16), 12_345),
        (torch.randn(5_000), 99_000),
        (torch.full((200_000,), torch.inf), 0),
        (torch.cat([torch.full((200_000,), -torch.nan), torch.randn(200_000)]), 7),
    ],
    ids=["two turns", "from the middle of a chunk", "a part of two chunks", "inf", "nan"],
)
def test_several_chunks_at_once_give_the_same(
    values: torch.Tensor, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on accelerators, which compute in torch, where each operation costs a kernel launch."""
    expected = sketch_of(values, offset=first)
    size = 4 * sketch._CHUNK
    space = torch.empty(size, dtype=torch.float64), torch.empty(size, dtype=torch.int64)
    monkeypatch.setattr(sketch, "_space", lambda device: space)
    numbers, bits, num_nonfinite = sketch._run_on_accelerator(values, first)
    counts = np.array([[bits, values.numel(), num_nonfinite]])
    _assert_equal(Sketches(numbers[None], counts)[0], expected)


def test_small_tensors_together_give_the_same_in_torch() -> None:
    """As on accelerators."""
    tensors = [torch.randn(40), torch.tensor([torch.inf, -torch.nan, 1.0]), torch.randn(1), torch.randn(4_000)]
    positions = [0, 7, 97_999, 97_000]
    layout = sketch._Layout([one.numel() for one in tensors], positions, torch.device("cpu"))
    found = sketch._together_on_accelerator(torch.cat(tensors).double(), layout)
    for one, expected in zip(found, sketches_of(tensors, positions), strict=True):
        _assert_equal(one, expected)


def test_many_tensors_in_one_call() -> None:
    tensors = [torch.randn(3, 4), torch.tensor(7), torch.zeros(0, 2), torch.randn(5000), torch.randn(8, 2).t()]
    for one, found in zip(tensors, sketches_of(tensors), strict=True):
        _assert_equal(found, sketch_of(one))
        assert found.norm == pytest.approx(float(one.double().norm()), rel=1e-12)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.ones(40_000), -torch.ones(40_000)),
        (
            torch.ones(40_000),
            torch.ones(40_000) * (1 - 2 * ((torch.arange(40_000) == 7) | (torch.arange(40_000) == 9)).float()),
        ),
        (torch.zeros(40_000), torch.zeros(40_000) * (1 - 2 * (torch.arange(40_000) % 2).float())),
        (torch.zeros(10), torch.zeros(10) * (1 - 2 * (torch.arange(10) % 2).float())),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])),
        (torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0 + 2**-52], dtype=torch.float64)),
    ],
)
def test_bits_differ(one: torch.Tensor, other: torch.Tensor) -> None:
    assert sketch_of(one).bits != sketch_of(other).bits
    assert sketch_of(one).bits == sketch_of(one.clone()).bits


@pytest.mark.parametrize("size", [10, 40_000])
def test_nonfinite_elements_are_counted(size: int) -> None:
    tensor = torch.ones(size)
    tensor[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    found = sketch_of(tensor)
    assert (found.num_nonfinite, found.square_sum) == (3, size - 3)
    assert np.isfinite(found.projection).all()


@pytest.mark.parametrize("size", [10, 40_000])
def test_all_nan_are_equal(size: int) -> None:
    one, other = torch.ones(size), torch.ones(size)
    one[3], other[3] = torch.tensor([0x7FC00000, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    assert torch.isnan(torch.stack([one[3], other[3]])).all()
    assert sketch_of(one).bits == sketch_of(other).bits
    other[4] = 2.0
    assert sketch_of(one).bits != sketch_of(other).bits


@pytest.mark.parametrize("kind", ["random", "constant", "rank one", "repeated rows", "one column"])
def test_the_distance_estimates_the_norm_of_the_difference(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    zero = Sketch(projection=np.zeros(NUM_BUCKETS), square_sum=0.0, bits=-1, num_elements=0, num_nonfinite=0)
    ratios = []
    for number in range(100):
        difference = {
            "random": torch.randn(50, 64, generator=generator),
            "constant": torch.ones(7 + number, 96) * (1 + number),
            "rank one": torch.randn(50, 1, generator=generator) * torch.randn(1, 64, generator=generator),
            "one column": torch.randn(200, 32, generator=generator) * torch.eye(32)[5],
            "repeated rows": torch.randn(1, 100, generator=generator).repeat(1000, 1),
        }[kind]
        # An offset gives each trial other signs, so that the trials are independent.
        found = sketch_of(difference, offset=number * 40_000)
        ratios.append(found.distance(zero) / float(difference.norm()))
    squares = np.square(ratios)
    # The squared ratio has mean 1 and a variance of at most 2 / NUM_BUCKETS (more for few elements), so the mean of 100 is within
    # 5 * 0.25 / 10 of 1.
    assert abs(squares.mean() - 1) < 0.125
    assert squares.std() < 0.5


def test_a_trace_holds_sketches_and_rows(tmp_path: Path) -> None:
    found = sketches_of([torch.randn(3, 4), torch.full((5,), torch.nan), torch.randn(70, 91)])
    row, output = Row(whole=2**63 + 5, prefix=7), np.arange(8.0).reshape(2, 4)
    written = [
        SketchedTensors(content="weights", update=0, names=["a", "b", "c"], sketches=list(found)),
        Batch(update=0, micro_step=0, source="loader", rows=[row]),
        Forward(update=0, micro_step=1, model=0, module="", shape=[2, 7], rows=output, is_without_padding=True),
    ]
    writer = TraceWriter(tmp_path, 0)
    for event in written:
        writer.add(event)
    writer.close()
    weights, batch, forward = read_trace(tmp_path).ranks[0]
    assert isinstance(weights, SketchedTensors)
    assert isinstance(forward, Forward)
    assert batch == written[1]
    assert (forward.rows == output).all()
    assert (forward.shape, forward.is_without_padding) == ([2, 7], True)
    for one, other in zip(weights.sketches, found, strict=True):
        _assert_equal(one, other)


def test_what_was_summarized_does_not_change_with_the_tensors() -> None:
    tensor = torch.ones(5)
    found = sketches_of([tensor])
    tensor.fill_(2.0)
    assert found[0].square_sum == 5.0


def test_the_same_bytes_of_small_tensors_of_another_dtype_differ() -> None:
    floats = torch.randn(10)
    for tensor in (floats, floats.view(torch.int32), floats):
        assert sketch_of(tensor).norm == pytest.approx(float(tensor.double().norm()), rel=1e-12)


class _Counted:
    """``LatestSketches`` whose sketches are compared with fresh ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.latest = LatestSketches()
        self._num_sketched = 0
        monkeypatch.setattr(sketch, "sketches_of", self._count)

    def _count(self, tensors: Sequence[torch.Tensor], positions: Sequence[sketch.Positions] | None = None) -> Sketches:
        self._num_sketched += len(tensors)
        return sketches_of(tensors, positions)

    def num_sketched(self, offset: int = 0, **tensors: torch.Tensor) -> int:
        """Check the sketches of tensors by key, and return how many of them were computed."""
        self._num_sketched = 0
        found = self.latest.sketches_of(list(tensors), list(tensors.values()), [offset] * len(tensors))
        num_sketched = self._num_sketched
        for sketches in (found, self.latest.known(list(tensors))):
            for one, tensor in zip(sketches, tensors.values(), strict=True):
                _assert_equal(one, sketch_of(tensor, offset=offset))
        return num_sketched


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    return _Counted(monkeypatch)


@pytest.mark.parametrize("place", [0, 5_000, 9_999])
def test_changed_contents_are_sketched_again(counted: _Counted, place: int) -> None:
    tensor = torch.randn(10_000)
    before = tensor.clone()
    assert counted.num_sketched(a=tensor) == 1
    assert counted.num_sketched(a=tensor) == 0
    assert counted.num_sketched(a=before) == 0
    tensor[place] *= -1
    assert counted.num_sketched(a=tensor) == 1
    assert counted.num_sketched(a=before) == 1


def test_an_equal_tensor_of_another_key_has_its_own_sketch(counted: _Counted) -> None:
    tensor, other = torch.randn(2, 10_000)
    assert counted.num_sketched(a=tensor) == 1
    assert counted.num_sketched(b=tensor) == 1
    assert counted.num_sketched(b=other) == 1
    assert counted.num_sketched(a=tensor, b=other) == 0
    assert counted.num_sketched(a=other, b=tensor) == 2


def test_two_tensors_of_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tensors have 1 keys"):
        LatestSketches().sketches_of(["a", "a"], list(torch.randn(2, 10_000)))


def test_a_forgotten_key_is_sketched_again(counted: _Counted) -> None:
    tensor = torch.randn(10_000)
    assert counted.num_sketched(a=tensor, b=tensor) == 2
    counted.latest.forget("a")
    counted.latest.forget("never known")
    forgotten, kept = counted.latest.known(["a", "b"])
    assert (forgotten.num_elements, forgotten.bits, forgotten.norm) == (0, 0, 0.0)
    _assert_equal(kept, sketch_of(tensor))
    assert counted.num_sketched(a=tensor, b=tensor) == 1


def test_the_same_bytes_of_another_dtype_or_place_are_sketched_again(counted: _Counted) -> None:
    tensor = torch.randn(10_000)
    assert counted.num_sketched(a=tensor) == 1
    assert counted.num_sketched(a=tensor.view(torch.int32)) == 1
    assert counted.num_sketched(a=tensor.view(torch.bfloat16)) == 1
    assert counted.num_sketched(a=tensor) == 1
    assert counted.num_sketched(a=tensor, offset=3) == 1


def test_of_a_view_its_own_elements_count(counted: _Counted) -> None:
    whole = torch.randn(20_000)
    first, second = whole[:10_000], whole[10_000:]
    assert counted.num_sketched(a=first) == 1
    assert counted.num_sketched(a=second) == 1
    whole[:10_000] = 1.0
    assert counted.num_sketched(a=second) == 0
    whole[-1] = 1.0
    assert counted.num_sketched(a=second) == 1
    matrix = second.view(100, 100)
    assert counted.num_sketched(a=matrix) == 0
    assert counted.num_sketched(a=matrix.t()) == 1


def test_of_several_tensors_the_changed_ones_are_sketched_again(counted: _Counted) -> None:
    first, small, second = torch.randn(10_000), torch.randn(10), torch.randn(20_000)
    assert counted.num_sketched(first=first, small=small, second=second) == 3
    second[3] = 0.0
    small[3] = 0.0
    assert counted.num_sketched(first=first, small=small, second=second) == 2
    first[3] = 0.0
    assert counted.num_sketched(first=first, second=second) == 1
    assert counted.num_sketched(second=second, first=first) == 0
