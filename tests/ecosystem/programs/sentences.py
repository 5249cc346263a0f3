"""A sentence transformer with ``load_best_model_at_end``.

``--whole N``: see ``tiny.whole``; in the exact modes, an evaluation divides its batches, too. ``--gather``: the loss compares each text with
those of all processes; without dropout, whose masks depend on the number of processes.
"""

import os
import sys

import tiny
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer


def main() -> None:
    folder = f"bert{os.environ.get('RANK', '0')}"  # one for each rank
    gathers = "--gather" in sys.argv
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    tiny.bert(**(no_dropout if gathers else {})).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    transformer = Transformer(folder, max_seq_length=32)
    model = SentenceTransformer(
        modules=[transformer, Pooling(transformer.get_word_embedding_dimension())], device="cpu"
    )
    args = SentenceTransformerTrainingArguments(
        output_dir="out", per_device_train_batch_size=tiny.share_of(8), per_device_eval_batch_size=tiny.whole(8), num_train_epochs=3, learning_rate=2e-3,
        logging_steps=1, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, save_total_limit=2,
        metric_for_best_model="eval_pairs_spearman_cosine", report_to="none", use_cpu=True, seed=7, disable_tqdm=True,
    )  # fmt: skip

    def pairs(number: int, seed: int) -> Dataset:
        first = tiny.texts(number, seed)
        return Dataset.from_dict({"anchor": first, "positive": [" ".join(text.split()[1:]) for text in first]})

    held = tiny.texts(16, 9)
    scores = [i / 16 for i in range(16)]
    evaluator = EmbeddingSimilarityEvaluator(held, [" ".join(t.split()[:2]) for t in held], scores, name="pairs")
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=pairs(48, 1),
        eval_dataset=pairs(24 if "--whole" in sys.argv else 16, 4),
        loss=MultipleNegativesRankingLoss(model, gather_across_devices=gathers),
        evaluator=evaluator,
    )
    trainer.train()
    with torch.no_grad():
        embedding = model.encode(["w1 w2 w3"], convert_to_tensor=True)[0, :4].tolist()
    names = ("loss", "grad_norm", "eval_loss", "eval_pairs_spearman_cosine")
    tiny.show(
        **tiny.logged(trainer, *names), embedding=embedding,
        best=(trainer.state.best_model_checkpoint or "").rpartition("/")[2], best_metric=trainer.state.best_metric,
    )  # fmt: skip


if __name__ == "__main__":
    main()
