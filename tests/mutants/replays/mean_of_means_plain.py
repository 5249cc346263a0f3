"""The run of mean_of_means.py without a library and without accumulation: the mean over all tokens of the update."""

import torch
from ragged_texts import LanguageModel, make_texts
from torch.utils.data import DataLoader

torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(make_texts(), batch_size=4):
    model(**batch)["loss"].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
