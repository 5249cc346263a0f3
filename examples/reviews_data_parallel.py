"""Classify Chinese reviews with torch.nn.DataParallel: one process on all devices of the machine, or on the CPU.

python examples/reviews_data_parallel.py

Compared with reviews_plain.py, the model is wrapped, returns one loss per device, and the batch is split over the devices.
docs/data_parallel.md explains why the next example, reviews_accelerator.py, is faster.
"""

import torch
from reviews_data import batches_of, classify, load, parse_args
from torch.nn import DataParallel
from torch.utils.data import DataLoader


def main():
    options = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_devices = max(torch.cuda.device_count(), 1)

    torch.manual_seed(0)
    train_set, test_set, tokenizer, model = load(options)
    model = DataParallel(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    collate = batches_of(tokenizer)
    train_loader = DataLoader(train_set, batch_size=options.batch_size * num_devices, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(test_set, batch_size=100, collate_fn=collate)

    for epoch in range(options.epochs):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            loss = model(**batch.to(device)).loss.mean()  # over the devices
            loss.backward()
            optimizer.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for batch in test_loader:
                prediction = model(**batch.to(device)).logits.argmax(dim=1)
                correct += (prediction == batch["labels"]).sum().item()
        print(f"epoch {epoch + 1}: test accuracy {100 * correct / len(test_set):.1f} %")

    print(classify(model.module, tokenizer, options.text))


if __name__ == "__main__":
    main()
