"""Sketches add up over shards and estimate the norm of a difference."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.verify.sketch import NUM_BUCKETS, Sketch, Sketches, sketch_of, sketches_of
from echelon.verify.trace import Forward, ForwardPass, Gradients, ModelWeights, Note, TraceWriter, read_trace

SHAPE = (300, 371)


def _assert_equal(one: Sketch, other: Sketch) -> None:
    assert (one.bits, one.num_elements, one.num_nonfinite) == (other.bits, other.num_elements, other.num_nonfinite)
    # Both sum the same float64 numbers in another order.
    np.testing.assert_allclose(one.projection, other.projection, rtol=1e-10, atol=1e-10)
    assert one.square_sum == pytest.approx(other.square_sum, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("cuts", [(0, 100, 300), (0, 1, 150, 299, 300), (0, 0, 300), (0, 91, 300)])
def test_sketches_of_row_shards_add_up(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = torch.randn(SHAPE, dtype=dtype)
    # Also shards that begin at an odd element: float32 numbers are hashed in pairs.
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


@pytest.mark.parametrize("offset", [0, 1, 2, 98_016])
def test_a_view_into_a_tensor_has_the_bits_of_its_copy(offset: int) -> None:
    memory = torch.randn(200_001)
    for begin in range(3):  # not at an address at which an int64 number may begin
        view = memory[begin : begin + 150_000]
        assert sketch_of(view, offset=offset).bits == sketch_of(view.clone(), offset=offset).bits


def test_many_tensors_in_one_call() -> None:
    tensors = [torch.randn(3, 4), torch.tensor(7), torch.zeros(0, 2), torch.randn(5000), torch.randn(8, 2).t()]
    for one, sketch in zip(tensors, sketches_of(tensors), strict=True):
        _assert_equal(sketch, sketch_of(one))
        assert sketch.norm == pytest.approx(float(one.double().norm()), rel=1e-12)


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
    sketch = sketch_of(tensor)
    assert (sketch.num_nonfinite, sketch.square_sum) == (3, size - 3)
    assert np.isfinite(sketch.projection).all()


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
        sketch = sketch_of(difference, offset=number * 40_000)
        ratios.append(sketch.distance(zero) / float(difference.norm()))
    squares = np.square(ratios)
    # The squared ratio has mean 1 and a variance of at most 2 / NUM_BUCKETS (more for few elements), so the mean of 100 is within
    # 5 * 0.25 / 10 of 1.
    assert abs(squares.mean() - 1) < 0.125
    assert squares.std() < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_trace_holds_small_tensors_as_they_are_and_gives_their_sketches(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = [(100 * torch.randn(shape)).to(dtype) for shape in ((3, 4), (5,), (70, 41))]
    found, later = sketches_of(tensors), sketches_of([one + 1 for one in tensors])
    writer = TraceWriter(tmp_path, 0)
    names = ["a", "b", "c"]
    for stage in ("local", "reduced"):  # the second one is the same object
        writer.add(Gradients(stage=stage, update=0, micro_step=0, model=0, names=names, sketches=found))  # type: ignore[arg-type]
    writer.add(Note(update=0, text="between"))
    writer.add(ModelWeights(update=0, model=0, names=names, sketches=later))
    writer.close()
    local, reduced, _, weights = read_trace(tmp_path).ranks[0]
    assert isinstance(local, Gradients)
    assert isinstance(reduced, Gradients)
    assert isinstance(weights, ModelWeights)
    for place, tensor in enumerate(tensors):
        _assert_equal(local.sketches[place], sketch_of(tensor))
        _assert_equal(reduced.sketches[place], sketch_of(tensor))
        _assert_equal(weights.sketches[place], sketch_of(tensor + 1))
    assert (found.raw is not None) == (dtype in (torch.float32, torch.float64))


def test_small_tensors_have_equal_bits_only_if_all_elements_have() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5)]
    other = [tensors[0], tensors[1].clone()]
    assert sketches_of(tensors).has_bits_of(sketches_of(other))
    other[1][4] = torch.nextafter(other[1][4], torch.tensor(torch.inf))
    assert not sketches_of(tensors).has_bits_of(sketches_of(other))
    assert not sketches_of(tensors).has_bits_of(Sketches.of(list(sketches_of(other))))
    assert sketches_of(tensors).has_bits_of(Sketches.of(list(sketches_of(tensors))))


def test_what_was_summarized_does_not_change_with_the_tensors() -> None:
    tensor = torch.ones(5)
    found = sketches_of([tensor])
    tensor.fill_(2.0)
    assert found[0].square_sum == 5.0


def test_the_outputs_of_a_forward_pass_are_read_one_by_one(tmp_path: Path) -> None:
    rows, total = np.arange(8.0).reshape(2, 4), np.arange(32.0)
    writer = TraceWriter(tmp_path, 0)
    writer.add(
        ForwardPass(
            update=1,
            micro_step=2,
            model=0,
            modules=["first", "second"],
            shapes=[[2, 7], [9]],
            num_rows=[2, 0],
            is_without_padding=[True, False],
            numbers=np.concatenate([rows.reshape(-1), total]),
        )
    )
    writer.close()
    first, second = read_trace(tmp_path).ranks[0]
    assert isinstance(first, Forward)
    assert isinstance(second, Forward)
    assert (first.module, first.shape, first.is_without_padding, first.micro_step) == ("first", [2, 7], True, 2)
    assert (first.rows == rows).all()
    assert not first.total.any()
    assert (second.module, len(second.rows), second.is_without_padding) == ("second", 0, False)
    assert (second.total == total).all()
