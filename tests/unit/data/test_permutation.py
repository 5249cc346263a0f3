from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from echelon.base.errors import UsageError
from echelon.data.exact.permutation import ExplicitPermutation, FeistelPermutation, Permutation, _permute

MASK = 2**64 - 1
LARGE = (2**24 + 1, 10**12, 2**48)  # 2**24 + 1: the worst case of a network over a whole number of bits

# What the orders must be.


def mix(word: int) -> int:
    """The finalizer of splitmix64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def round_keys(n: int, seed: int, epoch: int) -> list[int]:
    keys = []
    for number in range(8):
        key = 0
        for part in (seed, epoch, n, number):
            key = mix((key + part + 0x9E3779B97F4A7C15) & MASK)
        keys.append(key)
    return keys


def feistel(position: int, n: int, seed: int, epoch: int) -> int:
    """The definition, in Python's own integers."""
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    while True:
        row, column = divmod(position, columns)
        for number, key in enumerate(round_keys(n, seed, epoch)):
            if number % 2 == 0:
                row = (row + ((mix((column + key) & MASK) >> 24) * rows >> 40)) % rows
            else:
                column = (column + ((mix((row + key) & MASK) >> 24) * columns >> 40)) % columns
        position = row * columns + column
        if position < n:
            return position


def sorted_by_hash(n: int, seed: int, epoch: int) -> list[int]:
    key = round_keys(n, seed, epoch)[0]
    return sorted(range(n), key=lambda index: mix((index * 0x9E3779B97F4A7C15 + key) & MASK))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 97, 1000, 2**16, 2**16 + 1, 10**6])
def test_explicit_order_is_that_of_randperm(n: int) -> None:
    order = ExplicitPermutation(n, seed=11, epoch=3)
    assert torch.equal(order.indices(range(n)), torch.randperm(n, generator=torch.Generator().manual_seed(11 + 3)))
    assert order._order.nbytes == 4 * n


@pytest.mark.parametrize("n", [2**16 + 1, 10**6, *LARGE])
def test_feistel_order_is_that_of_its_definition(n: int) -> None:
    positions = [0, 1, 2, n // 2, n - 2, n - 1]
    order = FeistelPermutation(n, seed=2**63 + 5, epoch=2)
    assert order.indices(torch.tensor(positions)).tolist() == [feistel(i, n, 2**63 + 5, 2) for i in positions]


@pytest.mark.parametrize("n", [0, 1, 2, 97, 2000])
def test_feistel_order_of_few_samples_sorts_keyed_hashes(n: int) -> None:
    assert FeistelPermutation(n, seed=5, epoch=1).indices(range(n)).tolist() == sorted_by_hash(n, 5, 1)


def test_feistel_orders_never_change() -> None:
    """A checkpoint holds a position, and the order must be the same when it is loaded years later."""
    assert FeistelPermutation(10, seed=0).indices(range(10)).tolist() == [9, 5, 1, 3, 6, 4, 0, 2, 7, 8]
    assert FeistelPermutation(10**12, seed=0).indices(range(4)).tolist() == [
        867102134192,
        623628449856,
        199793998098,
        904254482734,
    ]
    assert FeistelPermutation(10**12, seed=0, epoch=1).indices(range(4)).tolist() == [
        570149593405,
        908713010761,
        877543539877,
        72427716178,
    ]


# Each index once.


@pytest.mark.slow
def test_feistel_has_each_index_once_for_every_n_up_to_2000() -> None:
    keys = [np.uint64(key) for key in round_keys(2000, 7, 0)]
    for n in range(1, 2001):
        stored = FeistelPermutation(n, seed=n).indices(range(n)).numpy()
        computed = _permute(np.arange(n, dtype=np.uint64), n, keys)  # as for larger n
        for found in (stored, computed):
            assert (np.bincount(found.astype(np.int64), minlength=n) == 1).all(), n


def test_feistel_has_each_of_ten_million_indices_once() -> None:
    n = 10**7
    order, seen = FeistelPermutation(n, seed=1), np.zeros(n, dtype=bool)
    for start in range(0, n, 16_384):
        seen[order.indices(range(start, min(start + 16_384, n))).numpy()] = True
    assert seen.all()  # as many indices as positions


@pytest.mark.parametrize("n", LARGE)
@pytest.mark.parametrize("start", [0, -100_000])
def test_feistel_repeats_no_index_where_n_is_large(n: int, start: int) -> None:
    start %= n
    found = FeistelPermutation(n, seed=1).indices(range(start, start + 100_000))
    assert int(found.min()) >= 0
    assert int(found.max()) < n
    assert len(found.unique()) == 100_000


def test_feistel_rejects_more_samples_than_it_supports() -> None:
    with pytest.raises(UsageError, match=r"281474976710657 samples.* at most 281474976710656"):
        FeistelPermutation(2**48 + 1, seed=0)


# Seeking.

KINDS = pytest.mark.parametrize("kind", [ExplicitPermutation, FeistelPermutation])


@KINDS
@pytest.mark.parametrize("n", [1000, 70_000])
def test_seeking_matches_reading_from_the_start(kind: type[Permutation], n: int) -> None:
    order = kind(n, 3, 1)
    whole = order.indices(range(n)).tolist()
    assert len(whole) == n
    assert order.indices(range(n - 1, 0, -7)).tolist() == whole[n - 1 : 0 : -7]
    assert order.indices(torch.tensor([[5, 0], [n - 1, 5]])).tolist() == [
        [whole[5], whole[0]],
        [whole[n - 1], whole[5]],
    ]
    assert order.indices(torch.tensor(7)).item() == whole[7]
    assert order.indices(range(4, 4)).tolist() == []
    for start in (0, 1, 555, n - 1, n):
        assert order.indices(range(start, n)).tolist() == whole[start:]


@KINDS
def test_orders_differ_by_seed_and_epoch(kind: type[Permutation]) -> None:
    order = kind(70_000, 3, 1)
    assert torch.equal(kind(70_000, 3, 1).indices(range(70_000)), order.indices(range(70_000)))
    for other in (kind(70_000, 3, 2), kind(70_000, 4, 0 if kind is FeistelPermutation else 1)):
        same = (order.indices(range(70_000)) == other.indices(range(70_000))).sum()
        assert same < 20  # of two unrelated orders: 1 on average


# Looking shuffled. The seeds are fixed, so that these pass always or never.


def network(n: int, seed: int, rounds: int = 8) -> np.ndarray:
    """The order of the Feistel network itself, also where n is small."""
    keys = [np.uint64(key) for key in round_keys(n, seed, 0)]
    return _permute(np.arange(n, dtype=np.uint64), n, keys[:rounds]).astype(np.int64)


def ours(n: int, seed: int) -> np.ndarray:
    return FeistelPermutation(n, seed).indices(range(n)).numpy()


def ours_by_epoch(n: int, epoch: int) -> np.ndarray:
    return FeistelPermutation(n, 0, epoch).indices(range(n)).numpy()


def true_shuffle(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(n)


def linear(n: int, seed: int) -> np.ndarray:
    factor = next(a for a in range(n // 3 + seed, 2 * n) if math.gcd(a, n) == 1)
    return (np.arange(n) * factor + seed) % n


def chi2_p(statistic: float, freedom: int) -> float:
    """The chance of a value as far out; of many cells also on the lower side, as too even is not random either."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    upper = torch.special.gammaincc(half[0], half[1]).item()
    return 2 * min(upper, 1 - upper) if freedom > 10 else upper


class Positions:
    """Chi2 of (position, index) over the seeds.

    Rows and columns have fixed sums, so that its mean is n / (n - 1) times the degrees of freedom.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.bins = n if n <= 100 else 10 if n < 10**5 else 50
        self.counts = np.zeros((self.bins, self.bins))
        self.total, self.freedom = 0.0, 0

    def add(self, order: np.ndarray) -> None:
        cells = (np.arange(self.n) * self.bins // self.n) * self.bins + order * self.bins // self.n
        self.counts += np.bincount(cells, minlength=self.bins**2).reshape(self.bins, self.bins)
        if self.n > 100:  # few samples: the seeds' counts are summed first
            self.close()

    def close(self) -> None:
        expected = np.outer(self.counts.sum(1), self.counts.sum(0)) / self.counts.sum()
        self.total += ((self.counts - expected) ** 2 / expected).sum() * (self.n - 1) / self.n
        self.freedom += (self.bins - 1) ** 2
        self.counts[:] = 0

    def p(self) -> float:
        if self.counts.any():
            self.close()
        return chi2_p(float(self.total), self.freedom)


def correlation_z(order: np.ndarray, lag: int) -> float:
    """Of indices ``lag`` positions apart, in standard deviations. Source: Wald and Wolfowitz 1943."""
    n = len(order)
    centred = order - (n - 1) / 2
    two, four = (centred**2).sum(), (centred**4).sum()
    mean = -two / (n - 1)
    variance = (two**2 - four) / (n - 1) + (two**2 - 2 * four) / ((n - 1) * (n - 2)) - mean**2
    return float((centred @ np.roll(centred, -lag) - mean) / math.sqrt(variance))


def p_values(shuffle: Callable[[int, int], np.ndarray], n: int, seeds: Iterable[int]) -> dict[str, float]:
    """What a true shuffle fails with the chance that is given, by name of the test."""
    positions, successors = Positions(n), Positions(n)
    row = -(-n // (math.isqrt(n - 1) + 1))
    lags = [lag for lag in sorted({1, 2, row}) if n >= 5 and 2 * lag < n]
    scores: dict[int, list[float]] = {lag: [] for lag in lags}
    classes = min(n - 1, 10)
    strides = np.zeros(classes)
    before = None
    for seed in seeds:
        order = shuffle(n, seed)
        positions.add(order)
        if before is not None:
            onward = np.empty(n, dtype=np.int64)
            onward[before] = order
            successors.add(onward)  # of two unrelated orders: a shuffle as well
        before = order
        for lag in lags:
            scores[lag].append(correlation_z(order, lag))
        # The strides of one order depend on each other, where they are few.
        stride = ((np.roll(order, -1) - order) % n)[: 1 if n <= 100 else n]
        if n >= 1000:
            assert np.bincount(stride).max() < 20  # Poisson of mean 1
        strides += np.bincount((stride - 1) * classes // (n - 1), minlength=classes)
    found = {"position": positions.p(), "succession": successors.p()}
    for lag, values in scores.items():
        found[f"neighbours {lag} apart"] = math.erfc(abs(sum(values)) / math.sqrt(2 * len(values)))
    if n > 2:
        sizes = np.bincount(np.arange(n - 1) * classes // (n - 1))
        expected = strides.sum() * sizes / sizes.sum()
        found["stride"] = chi2_p(((strides - expected) ** 2 / expected).sum(), classes - 1)
    return found


def worst(shuffle: Callable[[int, int], np.ndarray], sizes: dict[int, int]) -> tuple[float, str]:
    """The smallest p-value, after Bonferroni's correction for the number of tests; ``sizes``: n -> seeds."""
    found = [
        (p, f"n={n}: {name}") for n, seeds in sizes.items() for name, p in p_values(shuffle, n, range(seeds)).items()
    ]
    p, name = min(found)
    return p * len(found), name


SMALL = dict.fromkeys((2, 3, 5, 10, 97, 1000), 100)


@pytest.mark.parametrize("shuffle", [ours, ours_by_epoch, true_shuffle])
def test_feistel_looks_like_a_true_shuffle(shuffle: Callable[[int, int], np.ndarray]) -> None:
    p, name = worst(shuffle, SMALL | {70_001: 5})
    assert p > 0.001, name


def test_the_statistical_test_detects_four_rounds() -> None:
    assert worst(lambda n, seed: network(n, seed, rounds=4), {1000: 100})[0] < 1e-9


def test_the_statistical_test_detects_a_fixed_stride() -> None:
    with pytest.raises(AssertionError, match="< 20"):
        p_values(linear, 1000, range(2))


@pytest.mark.parametrize(("n", "orders"), [(3, 6), (5, 120)])
def test_feistel_gives_each_order_of_few_samples_equally_often(n: int, orders: int) -> None:
    seeds = 10 * orders
    found = Counter(tuple(FeistelPermutation(n, seed).indices(range(n)).tolist()) for seed in range(seeds))
    assert len(found) == orders
    expected = seeds / orders
    assert chi2_p(sum((count - expected) ** 2 for count in found.values()) / expected, orders - 1) > 0.001
