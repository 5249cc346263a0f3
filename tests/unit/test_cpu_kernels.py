"""The kernels that replace torch's on the CPU give the same bits as torch's own; the reference is taken before they are replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from echelon.accelerator.prepare import cpu_kernels


def _images(kind: str, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    images = torch.randn(6, 16, 23, 24, dtype=dtype, generator=draw)
    if kind == "ties":
        return images.round().relu()
    if kind == "not finite":
        images[images > 1.5] = float("nan")
        images[images < -1] = -float("inf")
    if kind == "zeros of both signs":
        return images.clamp(-1e-30, 1e-30) * 0
    return images


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "not finite", "zeros of both signs"])
@pytest.mark.parametrize(
    "options",
    [
        ([2, 2], [2, 2], [0, 0], [1, 1], False),
        ([2, 2], [], [0, 0], [1, 1], True),
        ([3, 3], [2, 2], [1, 1], [1, 1], True),
        ([3, 2], [1, 2], [1, 0], [2, 3], False),
        ([5], [3], [2], [1], False),
    ],
    ids=str,
)
def test_pooling_gives_the_bits_and_indices_of_the_kernel_for_contiguous_images(
    kind: str, dtype: torch.dtype, options: Any
) -> None:
    images = _images(kind, dtype)
    out: Any = torch.ops.aten.max_pool2d_with_indices.out  # its kernels are never replaced
    values, indices = out(images, *options, out=torch.empty(0, dtype=dtype), indices=torch.empty(0, dtype=torch.int64))
    own = cpu_kernels._max_pool2d(images, *options)
    integers = torch.int32 if dtype is torch.float32 else torch.int64
    assert torch.equal(own[0].view(integers), values.view(integers))
    assert torch.equal(own[1], indices)
    assert [one.stride() for one in own] == [values.stride(), indices.stride()]
    # The slow kernel saw the contiguous images, the fast one did not: otherwise this compares a kernel with itself.
    assert not images.is_contiguous(memory_format=torch.channels_last)
    assert images.size(1) >= cpu_kernels._FEWEST_CHANNELS
    assert images.numel() >= cpu_kernels._FEWEST_PIXELS


def test_small_strided_and_unbatched_images_are_pooled_as_they_are() -> None:
    out: Any = torch.ops.aten.max_pool2d_with_indices.out
    large = _images("random", torch.float32)
    for images in (
        large[:1, :3],
        large.contiguous(memory_format=torch.channels_last),
        large.transpose(2, 3),
        large[0],
        large.bfloat16(),
        torch.randn(4000, 1, 4, 4),
    ):
        expected = out(
            images,
            [2, 2],
            out=torch.empty(0, dtype=images.dtype),
            indices=torch.empty(0, dtype=torch.int64),
        )
        for own, other in zip(cpu_kernels._max_pool2d(images, [2, 2]), expected, strict=True):
            assert torch.equal(own, other)
            assert own.stride() == other.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["random", "ties", "not finite"])
@pytest.mark.parametrize(
    "options",
    [
        ([2, 2], [2, 2], [0, 0], [1, 1], False),
        ([2, 2], [], [0, 0], [1, 1], True),
        ([3, 3], [1, 2], [1, 1], [1, 1], True),
        ([3, 2], [1, 1], [1, 0], [2, 3], False),
    ],
    ids=str,
)
def test_gradients_of_pooled_images_have_the_bits_and_the_format_of_torchs(
    kind: str, dtype: torch.dtype, options: Any
) -> None:
    into: Any = torch.ops.aten.max_pool2d_with_indices_backward.grad_input  # its kernels are never replaced
    out: Any = torch.ops.aten.max_pool2d_with_indices.out
    integers = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}[dtype]
    contiguous = _images(kind, dtype)
    for images in (contiguous, contiguous.contiguous(memory_format=torch.channels_last), contiguous.transpose(2, 3)):
        values, indices = out(images, *options, out=images.new_empty(0), indices=torch.empty(0, dtype=torch.int64))
        drawn = torch.randn(values.shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
        for gradients in (drawn, drawn.contiguous(memory_format=torch.channels_last), drawn[:1].expand_as(drawn)):
            arguments: Any = (gradients, images, *options, indices)
            expected = into(*arguments, grad_input=images.new_empty(0))
            own = cpu_kernels._max_pool2d_backward(*arguments)
            assert torch.equal(own.view(integers), expected.view(integers))
            assert own.stride() == expected.stride()


def test_gradients_of_a_single_pooled_image_are_torchs() -> None:
    into: Any = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
    image = _images("random", torch.float32)[0]
    options: Any = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    values, indices = torch.ops.aten.max_pool2d_with_indices.default(image, *options)
    arguments: Any = (values, image, *options, indices)
    expected = into(*arguments, grad_input=image.new_empty(0))
    assert torch.equal(cpu_kernels._max_pool2d_backward(*arguments), expected)


PROBABILITIES = (0.0, 1e-17, 0.1, 1 / 3, 0.5, 0.75, 1 - 0.1, 1 - 2**-53, 1.0)


def _same_masks(probability: float, tensor: torch.Tensor) -> bool:
    first, second = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    other = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    by_tensor: Any = torch.ops.aten.bernoulli_.Tensor
    by_tensor(tensor, torch.tensor(probability, dtype=torch.float64), generator=first)
    result = cpu_kernels._bernoulli(other, probability, generator=second)
    assert result.data_ptr() == other.data_ptr()
    return torch.equal(tensor, other) and torch.equal(first.get_state(), second.get_state())


@pytest.mark.parametrize("probability", PROBABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_masks_are_those_of_the_kernel_for_probabilities_in_a_tensor(probability: float, dtype: torch.dtype) -> None:
    for shape in ((3, 5), (cpu_kernels._FEWEST_DRAWN,), (37, 11, 290)):
        assert _same_masks(probability, torch.empty(shape, dtype=dtype))
    assert _same_masks(probability, torch.empty(8, 16, 9, 9, dtype=dtype).to(memory_format=torch.channels_last))
    assert _same_masks(probability, torch.empty(200, 90, dtype=dtype)[:, ::2])


def test_a_wrong_probability_is_refused_as_by_torch() -> None:
    for probability in (-0.1, 1.1, float("nan")):
        with pytest.raises(RuntimeError, match=r"bernoulli|p"):
            cpu_kernels._bernoulli(torch.empty(2**13), probability)


# In a process of its own, because a replaced kernel stays.
TRAINS = """
import sys, torch, torch.nn.functional as F
from torch import nn
from echelon import Accelerator
from echelon.accelerator.prepare import cpu_kernels

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.dropout, self.head = nn.Conv2d(1, 16, 3), nn.Dropout(0.3), nn.Linear(16 * 13 * 13, 30)
    def forward(self, x):
        return self.head(self.dropout(F.max_pool2d(F.relu(self.conv(x)), 2)).flatten(1))

def train(prepare, backward, memory_format):
    torch.manual_seed(0)
    model = Net().to(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer)
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(F.cross_entropy(model(torch.randn(16, 1, 28, 28)), torch.arange(16)))
        optimizer.step()
    return [*model.parameters(), torch.get_rng_state()]

FORMATS = torch.contiguous_format, torch.channels_last
plain = [train(lambda *parts: parts, lambda loss: loss.backward(), each) for each in FORMATS]
calls = []
for name in ("_max_pool2d", "_max_pool2d_backward", "_bernoulli"):
    kernel = getattr(cpu_kernels, name)
    def counted(*args, kernel=kernel, name=name, **options):
        calls.append(name)
        return kernel(*args, **options)
    setattr(cpu_kernels, name, counted)
accelerator = Accelerator(cpu=True, speed=sys.argv[1])
for before, memory_format in zip(plain, FORMATS):
    own = train(accelerator.prepare, accelerator.backward, memory_format)
    assert all(map(torch.equal, before, own)), "weights or the generator differ"
if sys.argv[2:]:
    compiled = torch.compile(lambda x: F.dropout(F.max_pool2d(x, 2), 0.5), backend="aot_eager")
    compiled(torch.randn(16, 16, 26, 26, requires_grad=True)).sum().backward()
torch.func.vmap(lambda x: F.max_pool2d(x, 2))(torch.randn(2, 16, 16, 26, 26))
print(sorted(set(calls)))
"""


def _train(speed: str, *further: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", TRAINS, speed, *further],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ECHELON_NO_RECORD": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_convolutional_network_trains_with_them_to_the_same_bits() -> None:
    # Where torch draws masks by MKL, it goes on to do so, after one comparison.
    assert _train("safe", "compile") == "['_bernoulli', '_max_pool2d', '_max_pool2d_backward']"


def test_images_are_not_copied_where_the_memory_for_it_comes_from_the_kernel() -> None:
    assert _train("safe", MALLOC_TOP_PAD_="0") == "['_bernoulli', '_max_pool2d_backward']"


def test_off_replaces_nothing() -> None:
    assert _train("off") == "[]"


ALLOCATES = """
import resource, sys, torch
from echelon.accelerator.prepare.freed_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    tensors = [torch.ones(10_000_000) for _ in range(4)]

for _ in range(3):
    step()
before = faults()
step()
usual = faults() - before
is_set = keep_freed_memory(512 << 20)
for _ in range(3):
    step()
before = faults()
step()
print(is_set, usual > 4000, faults() - before < 100)
"""


def _allocate(**environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATES],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


has_glibc = pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", {}), reason="the C library is not glibc"
)


@has_glibc
def test_freed_memory_is_not_fetched_from_the_kernel_again() -> None:
    assert _allocate() == "True True True"


@has_glibc
@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TOP_PAD_": "0"},
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_what_the_user_has_set_for_the_allocator_remains(setting: dict[str, str]) -> None:
    assert _allocate(**setting).startswith("False")
