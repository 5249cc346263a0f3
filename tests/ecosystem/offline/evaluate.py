"""A stand-in for the package ``evaluate``, whose metrics are downloads: any metric is the mean agreement of predictions and references.

Agreement is 1 or 0 for labels, the share of equal entries for lists, and the share of common words for texts. All names that the
scripts read from a result have that value; the number of rows is recorded, too.
"""

from __future__ import annotations

from typing import Any

import sitecustomize  # type: ignore[import-not-found]

_NAMES = {
    "glue": ("accuracy", "f1"),
    "squad": ("exact_match", "f1"),
    "squad_v2": ("exact", "f1"),
    "seqeval": ("overall_precision", "overall_recall", "overall_f1", "overall_accuracy"),
    "rouge": ("rouge1", "rouge2", "rougeL", "rougeLsum"),
    "sacrebleu": ("score",),
}


def load(name: str, *args: Any, **kwargs: Any) -> Metric:
    """Return the metric of that name."""
    return Metric(name)


class Metric:
    """Collects predictions and references like a metric of ``evaluate``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._predictions: list[Any] = []
        self._references: list[Any] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._predictions += _plain(predictions)
        self._references += _plain(references)

    def compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, float]:
        """Return the mean agreement under each name, and forget the rows."""
        if predictions is not None:
            self.add_batch(predictions=predictions, references=references)
        if len(self._predictions) != len(self._references):
            raise ValueError(f"{len(self._predictions)} predictions for {len(self._references)} references")
        rows = len(self._predictions)
        mean = sum(map(_agreement, self._predictions, self._references)) / rows
        self._predictions, self._references = [], []
        sitecustomize.write("metrics", {"rows": rows, self._name: mean})
        return dict.fromkeys(_NAMES.get(self._name, (self._name,)), mean)


def _plain(values: Any) -> list[Any]:
    """Return a list, also of a tensor or an array."""
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _agreement(prediction: Any, reference: Any) -> float:
    if isinstance(prediction, dict):  # of squad
        prediction, reference = prediction["prediction_text"], (reference["answers"]["text"] or [""])[0]
    if isinstance(prediction, str):
        words, expected = (
            set((text if isinstance(text, str) else text[0]).split()) for text in (prediction, reference)
        )
        return len(words & expected) / max(1, len(words | expected))
    if isinstance(prediction, list):
        return sum(map(_agreement, prediction, reference)) / max(1, len(prediction))
    if isinstance(prediction, float) and isinstance(reference, float):
        return (prediction - reference) ** 2
    return float(prediction == reference)
