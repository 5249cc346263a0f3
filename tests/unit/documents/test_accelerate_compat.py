"""docs/accelerate_compat.md is up to date, and its data lists every public name with existing tests."""

from __future__ import annotations

from dataclasses import replace

from tests.side_by_side import compat


def test_the_page_is_up_to_date() -> None:
    expected = compat.page(compat.rows(), compat.differences())
    assert compat.PAGE.read_text() == expected, "python tests/side_by_side/compat.py --write"


def test_every_name_is_listed_with_a_test_that_mentions_it() -> None:
    assert list(compat.problems(compat.rows(), compat.differences())) == []


def test_a_wrong_row_is_reported() -> None:
    rows = compat.rows()
    row = next(row for row in rows if row.names == ("set_seed",))
    later = next(row for row in rows if "save_fsdp_model" in row.names)
    file = row.tests[0].partition("::")[0]
    for wrong, message in (
        (replace(row, where=f"{file}::test_nothing"), f"there is no test {file}::test_nothing"),
        (
            replace(row, where="unit/test_import_cost.py::test_an_unknown_name_is_an_attribute_error"),
            "do not mention set_seed",
        ),
        (replace(row, where="later: checkpoints"), "set_seed is supported"),
        (replace(later, where=row.where), "save_fsdp_model is not supported"),
        (replace(row, mark="X"), "no mark 'X'"),
    ):
        found = list(compat.problems([wrong if known.names == wrong.names else known for known in rows], []))
        assert any(message in text for text in found), (message, found)
    assert "section 1.7 lacks set_seed" in list(compat.problems([known for known in rows if known is not row], []))
    difference = compat.differences()[0]
    for tests, message in (((), "no test"), ((f"{file}::test_nothing",), f"there is no test {file}::test_nothing")):
        (found_one,) = compat.problems(rows, [replace(difference, tests=tests)])
        assert found_one.endswith(f": {message}")
