"""bf16: autocast in the forward pass, full precision outside."""

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, set_seed
from show import show
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=True, cache_enabled=False)])
show("mixed_precision", accelerator.mixed_precision)
x = torch.randn(32, 8)
y = torch.randn(32, 1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 16)
        self.b = torch.nn.Linear(16, 1)

    def forward(self, inputs):
        hidden = self.a(inputs)
        self.hidden_dtype = str(hidden.dtype)
        return {"out": self.b(torch.relu(hidden)), "hidden": (hidden,)}


own = Net()
optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(own, optimizer, DataLoader(TensorDataset(x, y), batch_size=8))
for inputs, targets in loader:
    outputs = model(inputs)
    loss = torch.nn.functional.mse_loss(outputs["out"], targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    show("loss", loss.item())
show("inside", own.hidden_dtype)
show("outputs", [str(outputs["out"].dtype), str(outputs["hidden"][0].dtype)])
show("weights", str(own.a.weight.dtype))
show("weight", own.b.weight)

with accelerator.autocast():
    show("in autocast", str((x @ x.T).dtype))
with accelerator.autocast(AutocastKwargs(enabled=False)):
    show("in autocast, switched off", str((x @ x.T).dtype))
show("outside", str((x @ x.T).dtype))

kept = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
show("unwrapped is mine", kept is own)
kept(x)
show("still in bf16", own.hidden_dtype)
plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
plain(x)
show("plain again", own.hidden_dtype)
