"""Classify Chinese reviews with the Accelerator: the plain loop on any number of processes.

python examples/reviews_accelerator.py
echelon launch --cpu --num_processes 2 examples/reviews_accelerator.py
torchrun --nproc-per-node 2 examples/reviews_accelerator.py
"""

import torch
from reviews_data import batches_of, classify, load, parse_args
from torch.utils.data import DataLoader

from echelon import Accelerator


def main():
    options = parse_args()
    accelerator = Accelerator()

    torch.manual_seed(0)
    train_set, test_set, tokenizer, model = load(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    collate = batches_of(tokenizer)
    train_loader = DataLoader(train_set, batch_size=options.batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, batch_size=100, collate_fn=collate)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    if accelerator.process_index > 0:
        torch.manual_seed(accelerator.process_index)  # other dropout masks than on rank 0

    for epoch in range(options.epochs):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for batch in test_loader:
                right = model(**batch).logits.argmax(dim=1) == batch["labels"]
                correct += accelerator.gather_for_metrics(right).sum().item()  # each review exactly once
        accelerator.print(f"epoch {epoch + 1}: test accuracy {100 * correct / len(test_set):.1f} %")

    if accelerator.is_main_process:
        print(classify(accelerator.unwrap_model(model), tokenizer, options.text))
    accelerator.end_training()


if __name__ == "__main__":
    main()
