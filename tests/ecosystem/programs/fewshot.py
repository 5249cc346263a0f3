"""setfit: a sentence transformer that is tuned on pairs, with a logistic regression on top."""

import os

import tiny
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression


def main() -> None:
    folder = f"bert{os.environ.get('RANK', '0')}"  # one for each rank
    tiny.bert().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    transformer = Transformer(folder, max_seq_length=32)
    body = SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")
    model = SetFitModel(model_body=body, model_head=LogisticRegression(), labels=["no", "yes"])
    lines = tiny.texts(40, 1)
    data = Dataset.from_dict({"text": lines, "label": [int("w" + str(n % 3) in line) for n, line in enumerate(lines)]})
    args = TrainingArguments(
        output_dir="out", batch_size=4, num_epochs=1, num_iterations=2, report_to="none", logging_steps=1, seed=7,
        eval_strategy="no", save_strategy="no",
    )  # fmt: skip

    def accuracy(predictions, labels) -> dict[str, float]:
        return {"accuracy": sum(int(a == b) for a, b in zip(list(predictions), list(labels))) / len(labels)}

    trainer = Trainer(
        model=model, args=args, train_dataset=data.select(range(24)), eval_dataset=data.select(range(24, 40)), metric=accuracy
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    with torch.no_grad():
        embedding = body.encode(["w1 w2 w3"], convert_to_tensor=True)[0, :4].tolist()
    history = trainer.st_trainer.state.log_history
    tiny.show(
        losses=[entry[name] for entry in history for name in ("loss", "embedding_loss") if name in entry], metrics=metrics,
        embedding=embedding, coefficients=model.model_head.coef_[0, :4].tolist(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
