"""What the machines of these tests run."""

# MNIST in float64, one global order and batch whatever the ranks (parity="exact"), each step saved, auto-resumed. The end compares
# with a plain loop of PyTorch on one process. ``trained_<restart>_<world size>_<step>`` says how far it is; the last step waits for ``enough``.
TRAIN = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
sys.path.insert(0, EXAMPLES)
from mnist_data import mnist
from echelon import Accelerator
from echelon.utils import ProjectConfiguration

SAMPLES, BATCH, EPOCHS = 120, 8, 4
STEPS = EPOCHS * SAMPLES // BATCH
images, labels = mnist(train=True, limit=SAMPLES).tensors
data = TensorDataset(images.double(), labels, torch.arange(SAMPLES))

def new_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()

class Ledger:
    def __init__(self):
        self.seen, self.worlds = [], []
    def state_dict(self):
        return vars(self)
    def load_state_dict(self, state):
        self.seen, self.worlds = list(state["seen"]), list(state["worlds"])

project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project, seed=7, parity="exact")
world = accelerator.num_processes
model = new_model()
loader = DataLoader(data, batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
ledger = Ledger()
accelerator.register_for_checkpointing(ledger)
accelerator.resume()
for epoch in accelerator.epochs(EPOCHS):
    for image, label, number in loader:
        while accelerator.progress.step == STEPS - 1 and not os.path.exists("enough"):
            time.sleep(0.02)
        if len(number):
            loss = torch.nn.functional.cross_entropy(model(image), label)
        else:
            loss = model(image).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        numbers = accelerator.gather_for_metrics(number)
        ledger.seen += numbers.tolist()
        ledger.worlds.append(world)
        accelerator.save_state()
        if accelerator.is_main_process:
            Path(f"trained_{os.environ['TORCHELASTIC_RESTART_COUNT']}_{world}_{accelerator.progress.step}").touch()
        time.sleep(1.0 if os.path.exists("slow") and not os.path.exists("enough") else 0.02)

plain = new_model()
optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
order = []
for epoch in range(EPOCHS):
    permutation = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(7 + epoch))
    for batch in permutation.split(BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(data.tensors[0][batch]), data.tensors[1][batch]).backward()
        optimizer.step()
        order += batch.tolist()
found = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
wanted = torch.cat([p.detach().flatten() for p in plain.parameters()])
error = ((found - wanted).norm() / wanted.norm()).item()
per_step = [sorted(ledger.seen[i : i + BATCH]) for i in range(0, len(ledger.seen), BATCH)]
same = per_step == [sorted(order[i : i + BATCH]) for i in range(0, len(order), BATCH)]
changes = [w for i, w in enumerate(ledger.worlds) if i == 0 or ledger.worlds[i - 1] != w]
import hashlib
digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16]
accelerator.print(f"digest {digest} worlds {changes}, steps {len(ledger.worlds)} of {STEPS}, each sample once {same}, error {error:.1e}, close {error < 1e-12}", flush=True)
accelerator.end_training()
"""
