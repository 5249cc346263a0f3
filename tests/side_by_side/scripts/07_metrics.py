"""An evaluation of 21 samples, which the processes cannot share evenly."""

import torch
from accelerate import Accelerator
from show import show
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
x = torch.arange(21.0).reshape(21, 1)
labels = (torch.arange(21) % 3 == 0).long()
model = torch.nn.Linear(1, 2)
with torch.no_grad():
    model.weight.copy_(torch.tensor([[0.1], [-0.2]]))
    model.bias.copy_(torch.tensor([-0.5, 1.0]))
model, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, labels), batch_size=4))
model.eval()

seen, right, everything, objects = [], 0, 0, []
for inputs, targets in loader:
    with torch.no_grad():
        predictions = model(inputs).argmax(dim=-1)
    everything += len(accelerator.gather(inputs))
    both = accelerator.gather_for_metrics({"predictions": predictions, "pair": (targets, inputs)})
    right += int((both["predictions"] == both["pair"][0]).sum())
    seen += both["pair"][1].flatten().tolist()
    names = [f"sample {int(value)}" for value in inputs.flatten()]
    objects += accelerator.gather_for_metrics(names)
show("samples", seen)
show("right", right)
show("gathered without care", everything)
show("objects", objects)

for inputs, _ in loader:
    as_objects = accelerator.gather_for_metrics(list(inputs), use_gather_object=True)
    show("tensors of any shape", [float(value) for value in as_objects])

gathered = accelerator.gather([torch.tensor([accelerator.process_index]), (torch.ones(1, 2),)])
show("gather", [gathered[0].tolist(), gathered[1][0].tolist()])
show("gather of a scalar", accelerator.gather(torch.tensor(1.0 + accelerator.process_index)))
