"""Seq2SeqTrainer: a Trainer that evaluates and predicts with generated text."""

# ruff: noqa: RUF009 - `setting` wraps `dataclasses.field`

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from echelon.base.errors import ConfigError, UsageError
from echelon.trainer.arguments.training_arguments import TrainingArguments, setting
from echelon.trainer.evaluation.evaluation_loop import predict_batch
from echelon.trainer.results import PredictionOutput
from echelon.trainer.trainer import Trainer


@runtime_checkable
class _Generates(Protocol):
    generation_config: Any

    def generate(self, **inputs: Any) -> torch.Tensor:
        """Return generated tokens [samples, length]."""
        ...


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """``TrainingArguments`` with settings for generation."""

    sortish_sampler: bool = setting(False, "Not supported; use train_sampling_strategy.")
    predict_with_generate: bool = setting(False, "Generate text during evaluation, for metrics such as ROUGE and BLEU.")
    generation_max_length: int | None = setting(None, "Value of max_length for generate (default: the model's).")
    generation_num_beams: int | None = setting(None, "Value of num_beams for generate (default: the model's).")
    generation_config: str | Path | Any = setting(
        None, "Generation config: an object, or the path to a directory or file."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler:
            raise ConfigError(
                "sortish_sampler is not supported; it has no effect in transformers 5 either",
                where="Seq2SeqTrainingArguments.sortish_sampler",
                do="set train_sampling_strategy='group_by_length'",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, with secrets masked and the generation config as a dict."""
        values = super().to_dict()
        if callable(as_dict := getattr(self.generation_config, "to_dict", None)):
            values["generation_config"] = as_dict()
        return values


class Seq2SeqTrainer(Trainer):
    """A Trainer whose evaluations and predictions generate text if ``predict_with_generate`` is set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gen_kwargs: dict[str, Any] = {}
        config = getattr(self.args, "generation_config", None)
        if config is not None:
            self.model.generation_config = self.load_generation_config(config)

    def load_generation_config(self, gen_config_arg: Any) -> Any:
        """Return a copy of a generation config, or load one from a path with the class of the model's own config.

        Raises:
            UsageError: a path is given, but the model has no generation config.
        """
        if not isinstance(gen_config_arg, (str, Path)):
            return copy.deepcopy(gen_config_arg)
        own = getattr(self.model, "generation_config", None)
        if own is None:
            raise UsageError(
                f"cannot load generation_config={str(gen_config_arg)!r}: {type(self.model).__name__} has no "
                "generation_config, so its class is unknown",
                where="Seq2SeqTrainingArguments.generation_config",
                do="pass a config object instead of a path",
            )
        path = Path(gen_config_arg)
        folder, name = (path.parent, path.name) if path.is_file() else (gen_config_arg, None)
        return type(own).from_pretrained(folder, name)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate; ``gen_kwargs`` are passed to ``generate`` (max_length, num_beams, ...).

        Collective: call on every rank.

        Examples:
            >>> metrics = trainer.evaluate(max_length=64, num_beams=4)  # doctest: +SKIP
        """
        self._gen_kwargs = self._generation(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict; ``gen_kwargs`` are passed to ``generate``.

        Collective: call on every rank.

        Examples:
            >>> output = trainer.predict(dataset, max_length=64)  # doctest: +SKIP
        """
        self._gen_kwargs = self._generation(gen_kwargs)
        return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, generated tokens and labels of one batch; tokens and labels are padded to the maximum length."""
        generates = getattr(self.args, "predict_with_generate", False)
        if not generates or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if not isinstance(self.model, _Generates) or not isinstance(inputs, Mapping):
            raise UsageError(
                f"predict_with_generate=True, but {type(self.model).__name__} has no generate() or no generation_config",
                where="Seq2SeqTrainingArguments.predict_with_generate",
                do="remove predict_with_generate, or use a generative transformers model",
            )
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        # A subclass may have set _gen_kwargs itself; None stands for the model's own setting.
        given = gen_kwargs or self._gen_kwargs
        wanted = {name: value for name, value in given.items() if value is not None}
        if self.accelerator.capabilities.shards_parameters:
            wanted.setdefault("synced_gpus", True)  # finished ranks continue, because the others need their shards
        tokens = self.model.generate(**_generation_inputs(inputs), **wanted)
        loss = None
        if labels is not None:
            # As in transformers, the model takes the mean over its own batch; only a loss function gets the number of labels.
            loss, _, _ = predict_batch(
                self,
                self._session,
                model,
                inputs,
                prediction_loss_only=True,
                ignore_keys=ignore_keys,
                count_items=self._get_num_items_in_batch if self.compute_loss_func is not None else _no_count,
            )
        return loss, self._padded(tokens, wanted), None if labels is None else self._padded(labels.detach(), wanted)

    def _generation(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for ``generate``, taken from the call or from the training arguments."""
        wanted = {name: value for name, value in given.items() if value is not None}
        if not {"max_length", "max_new_tokens"} & wanted.keys():
            wanted["max_length"] = getattr(self.args, "generation_max_length", None)
        wanted.setdefault("num_beams", getattr(self.args, "generation_num_beams", None))
        return {name: value for name, value in wanted.items() if value is not None}

    def _padded(self, tokens: torch.Tensor, wanted: Mapping[str, Any]) -> torch.Tensor:
        """Pad ``tokens`` to the maximum generated length, so that all batches can be concatenated."""
        config: Any = self.model.generation_config
        sizes = [
            wanted.get("max_length"),
            None if wanted.get("max_new_tokens") is None else wanted["max_new_tokens"] + 1,
        ]
        if sizes == [None, None]:
            new = getattr(config, "max_new_tokens", None)
            sizes = [getattr(config, "max_length", None), None if new is None else new + 1]
        length = max(size or 0 for size in sizes)
        return tokens if tokens.shape[-1] >= length else self._pad_tensors_to_max_len(tokens, length)

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """Return ``tensor`` [samples, length], padded on the right to [samples, max_length]."""
        longer = tensor.new_full((tensor.shape[0], max_length), self._padding_token())
        longer[:, : tensor.shape[-1]] = tensor
        return longer

    def _padding_token(self) -> int:
        for owner in (self.processing_class, self.model.generation_config, getattr(self.model, "config", None)):
            token = getattr(owner, "pad_token_id", None)
            if token is None:
                token = getattr(owner, "eos_token_id", None) if owner is self.processing_class else None
            if token is not None:
                return int(token)
        raise UsageError(
            "padding generated text needs a padding token, but neither the tokenizer nor the model defines one",
            where="Seq2SeqTrainer.prediction_step",
            do="set pad_token_id in the tokenizer or in the model's generation_config",
        )


def _generation_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs for ``generate``, without labels and decoder inputs derived from them."""
    labels, decoder = inputs.get("labels"), inputs.get("decoder_input_ids")
    from_labels = labels is not None and decoder is not None and labels.shape == decoder.shape
    excluded = {"labels"} | ({"decoder_input_ids", "decoder_attention_mask"} if from_labels else set())
    return {name: value for name, value in inputs.items() if name not in excluded}


def _no_count(samples: list[Any], device: torch.device) -> None:
    """Return no number of labels, so that the model divides by those of its own batch."""
