"""Samples are recognized by their content, whatever their padding and their place in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from echelon.verify.recorders.sample_rows import SampleRows, item_lengths, rows_of
from echelon.verify.trace import Row


def _rows(batch: Any) -> SampleRows:
    found = rows_of(batch)
    assert found is not None
    return found


def _same(a: Row, b: Row) -> bool:
    """The rule of the comparison (``Row``)."""
    return a.whole == b.whole or a.prefix == b.whole or a.whole == b.prefix or a.prefix == b.prefix


def _ragged(
    lengths: list[int], *, names: list[str], padding: dict[str, int], length: int | None = None
) -> dict[str, torch.Tensor]:
    """Return a batch whose sample of length n is the tokens 10 n + 3, 10 n + 2, ..., padded on the right."""
    tokens = {n: torch.arange(n).flip(0) + 10 * n + 3 for n in lengths}
    columns = {
        "input_ids": [tokens[n] for n in lengths],
        "labels": [tokens[n] for n in lengths],
        "attention_mask": [torch.ones(n, dtype=torch.long) for n in lengths],
    }
    batch = {}
    for name in names:
        value = padding.get(name, 0)
        whole = pad_sequence(columns[name], batch_first=True, padding_value=value)
        if length is not None:
            whole = torch.nn.functional.pad(whole, (0, length - whole.size(1)), value=value)
        batch[name] = whole
    return batch


_PADDINGS = [
    pytest.param(["input_ids"], {}, id="zeros"),
    pytest.param(["input_ids", "labels"], {"labels": -100}, id="ignored-labels"),
    pytest.param(["input_ids", "labels"], {"input_ids": 7, "labels": -100}, id="end-token-as-padding"),
    pytest.param(["input_ids", "labels", "attention_mask"], {"input_ids": 7, "labels": 7}, id="attention-mask"),
]


@pytest.mark.parametrize(("names", "padding"), _PADDINGS)
def test_a_sample_is_the_same_under_any_padding_and_has_the_same_key(names: list[str], padding: dict[str, int]) -> None:
    alone = {n: _rows(_ragged([n], names=names, padding=padding)) for n in (3, 4, 5, 9)}
    for lengths, length in [
        ([3, 5, 9], None),
        ([9, 5, 3], None),
        ([5, 3], None),
        ([3, 9, 5], 12),
        ([9], 10),
        ([4, 3], None),
    ]:
        together = _rows(_ragged(lengths, names=names, padding=padding, length=length))
        for place, n in enumerate(lengths):
            assert _same(together.rows[place], alone[n].rows[0])
            assert together.keys[place] == alone[n].keys[0]
        for a in range(len(lengths)):
            for b in range(a):
                assert not _same(together.rows[a], together.rows[b])
        (found,) = together.lengths.values()
        assert found.tolist() == lengths


def test_a_sample_padded_with_an_unknown_value_is_recognized() -> None:
    names, padding = ["input_ids"], {"input_ids": 7}
    alone = _rows(_ragged([3], names=names, padding=padding)).rows[0]
    for lengths in ([3, 4], [3, 9]):
        padded = _rows(_ragged(lengths, names=names, padding=padding)).rows
        assert _same(padded[0], alone)
        assert not _same(padded[1], alone)


def test_rows_do_not_depend_on_their_place() -> None:
    data = {"x": torch.randn(6, 3, 4), "y": torch.arange(6), "name": list("abcdef"), "flag": True}
    order = [3, 1, 5, 0, 2, 4]
    whole = _rows(data)
    mixed = _rows(
        {"x": data["x"][order], "y": data["y"][order], "name": [data["name"][i] for i in order], "flag": True}
    )
    assert mixed.rows == [whole.rows[i] for i in order]
    assert np.array_equal(mixed.keys, whole.keys[order])
    assert len(set(whole.rows)) == 6


def test_a_change_of_any_leaf_changes_the_row() -> None:
    data = {"x": torch.randn(4, 70000), "y": torch.arange(4), "name": ["a", "b", "c", "d"]}
    before = _rows(data).rows
    x = data["x"].clone()
    x[2, 69999] += 1e-3
    assert [a == b for a, b in zip(_rows({**data, "x": x}).rows, before)] == [True, True, False, True]
    assert [a == b for a, b in zip(_rows({**data, "name": ["a", "b", "c", "e"]}).rows, before)] == [
        True,
        True,
        True,
        False,
    ]
    assert _rows({**data, "y": torch.tensor([0, 9, 2, 3])}).rows[1] != before[1]


def test_rows_are_equal_in_float64() -> None:
    x = torch.randn(3, 5)
    assert _rows((x, torch.arange(3))).rows == _rows((x.double(), torch.arange(3))).rows
    assert _rows([x.bfloat16()]).rows == _rows([x.bfloat16().float()]).rows


def test_values_in_exchanged_places_are_another_sample() -> None:
    assert _rows([torch.tensor([[1, 2, 3, 9]])]).rows != _rows([torch.tensor([[2, 1, 3, 9]])]).rows
    a, b = torch.randn(2, 1, 4)
    assert _rows([a, b]).rows != _rows([b, a]).rows


def test_batches_without_samples_have_no_rows() -> None:
    assert rows_of({"scale": torch.tensor(2.0)}) is None
    assert rows_of(None) is None
    assert _rows(torch.zeros(0, 3)).rows == []


def test_labels_are_counted() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    assert _rows({"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": labels}).num_items == 3
    assert _rows((torch.zeros(2), torch.zeros(2))).num_items is None


def test_a_text_of_which_the_batch_cuts_the_last_token_is_recognized() -> None:
    """``padded[:, :-1]`` cuts a token of the longest text of a batch only. Padding is a token that also ends texts."""
    texts = [torch.tensor(one) for one in ([5, 6, 9, 7], [8, 4, 9], [3, 9, 9])]

    def batch(*numbers: int) -> SampleRows:
        chosen = [texts[number] for number in numbers]
        padded = pad_sequence(chosen, batch_first=True, padding_value=9)
        found = rows_of({"tokens": padded[:, :-1], "labels": padded[:, 1:]}, item_lengths(chosen))
        assert found is not None
        return found

    together = batch(0, 1, 2)
    for number, alone in enumerate((batch(0), batch(1), batch(2))):
        assert _same(alone.rows[0], together.rows[number])
        assert alone.keys[0] == together.keys[number]
        assert [one[0] for one in alone.lengths.values()] == [len(texts[number]) - 1]
    assert len({*together.keys.tolist()}) == 3
    assert together.lengths[3].tolist() == [3, 2, 2]


def test_the_lengths_of_items() -> None:
    lengths = item_lengths([{"ids": [1, 2], "x": torch.zeros(9)}, {"ids": torch.arange(3), "x": torch.zeros(9)}])
    assert lengths is not None
    assert lengths.tolist() == [2, 3]
    assert item_lengths([torch.zeros(3), torch.arange(3)]) is None  # an image has no length
