"""A missing path is answered with the one that resembles it."""

from __future__ import annotations

from pathlib import Path

from echelon.base.similar_path import suggest_path


def test_the_nearest_path_beside_it_is_suggested(tmp_path: Path) -> None:
    for name in ("train.py", "eval.py", "checkpoints"):
        (tmp_path / name).touch()
    assert suggest_path(tmp_path / "trian.py", otherwise="no") == f"did you mean {tmp_path / 'train.py'}?"
    assert suggest_path(str(tmp_path / "checkpoint"), otherwise="no") == f"did you mean {tmp_path / 'checkpoints'}?"
    assert suggest_path(tmp_path / "other.txt", otherwise="no") == "no"
    assert suggest_path(tmp_path / "none" / "train.py", otherwise="no") == "no"
