"""docs/trainer_compat.md is up to date, and its data lists every setting and method with existing tests."""

from __future__ import annotations

from dataclasses import replace

from tests.side_by_side import trainer_compat


def test_the_page_is_up_to_date() -> None:
    expected = trainer_compat.page(trainer_compat.rows())
    assert trainer_compat.PAGE.read_text() == expected, "python tests/side_by_side/trainer_compat.py --write"


def test_every_name_is_listed_with_a_test_that_mentions_it() -> None:
    assert list(trainer_compat.problems(trainer_compat.rows())) == []


def test_a_wrong_row_is_reported() -> None:
    rows = trainer_compat.rows()
    row = next(row for row in rows if row.names == ("debug",))
    for wrong, message in (
        (
            replace(row, where="options::test_nothing"),
            "there is no test unit/trainer/test_training_arguments_options.py::test_nothing",
        ),
        (replace(row, where="errors::test_two_optimizers"), "do not mention debug"),
        (replace(row, where=""), "no test"),
    ):
        found = list(trainer_compat.problems([wrong if known is row else known for known in rows]))
        assert any(message in text for text in found), (message, found)
    assert "not listed: debug" in list(trainer_compat.problems([known for known in rows if known is not row]))
