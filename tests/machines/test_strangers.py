"""Who does not know the token sees nothing of a run and changes nothing of it; and the command line of the tutorials on two agents."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Command
from tests.machines.conftest import TOKEN, Machine, Network
from tests.machines.test_elastic import flags_of, wait_for_steps

_ATTACK = Path(__file__).with_name("attack.py")


def listeners(machine: Machine) -> dict[int, str]:
    """The ports at which something listens off loopback, and their processes' command lines."""
    done = machine.network.run_in(machine, ["cat", "/proc/net/tcp", "/proc/net/tcp6"])
    inodes = {}
    for line in done.splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[3] == "0A":
            address, port = fields[1].split(":")
            if address not in ("0100007F", "00000000000000000000000001000000"):
                inodes[fields[9]] = int(port, 16)
    found = {}
    for pid in machine.pids():
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink())) if link.is_symlink() else None
            if match and match[1] in inodes:
                found[inodes[match[1]]] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    assert sorted(found) == sorted(inodes.values())
    return found


@pytest.mark.soak
def test_ten_thousand_connections_without_the_token_change_no_bit(network: Network) -> None:
    a, b, stranger = network.add(), network.add(), network.add()
    digests = []
    for is_attacked in (False, True):
        folder = network.command.directory / f"attacked_{is_attacked}"
        folder.mkdir()
        flags = flags_of(folder, a, "2")
        first = a.launch(*flags, folder=folder)
        second = b.launch(*flags, folder=folder)
        wait_for_steps(network, folder, 2, first)
        if is_attacked:
            found = listeners(a)
            attack = stranger.start([sys.executable, str(_ATTACK), a.address, "10000", "0", str(folder / "enough")])
            line = attack.stdout.readline() if attack.stdout is not None else ""
            said = json.loads(line)
            hub = [port for port, command in found.items() if " launch " in command]
            ranks = [port for port, command in found.items() if "worker.py" in command]
            assert hub == [29500]
            assert sorted(hub + ranks) == sorted(found)  # the launcher's, and gloo's of each rank: as SECURITY.md says
            assert sorted(said["ports"]) == sorted(found)
            # The hub says its nonce and no more; gloo's listener says nothing.
            assert said["answers"]["29500"] in ([40], [0, 40])
            assert all(sizes == [0] for port, sizes in said["answers"].items() if port != "29500")
            assert all("refused" in text for text in said["stores"].values()), said["stores"]
        (folder / "enough").touch()
        ends = [network.finish(process) for process in (first, second)]
        assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
        assert "close True" in ends[0].out
        digests.append(re.findall(r"digest (\w+)", ends[0].out))
        if is_attacked:
            network.finish(attack)
    assert digests[0]
    assert digests[0] == digests[1]


WORDS = ["--nproc_per_node", "2", "--nnodes", "2", "--rdzv_id", "2299", "--rdzv_backend", "c10d", "--rdzv_endpoint"]
SCRIPT = """
import torch
from echelon import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x = torch.arange(32.0)[:, None] / 32
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = None
for epoch in range(100):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        first = first if first is not None else accelerator.gather(loss.detach()[None]).mean().item()
last = accelerator.gather(loss.detach()[None]).mean().item()
accelerator.print(f"{accelerator.num_processes} processes, trained {last < first / 10}", flush=True)
accelerator.end_training()
"""


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "echelon launch"])
def test_the_words_of_the_tutorials_train_on_two_agents(launcher: str, network: Network) -> None:
    a, b = network.add(), network.add()
    network.command.write("script.py", SCRIPT)
    module = {"torchrun": ["torch.distributed.run"], "echelon launch": ["echelon", "launch"]}[launcher]
    # torchrun's gloo takes the address of the host's name, which in a namespace is another machine's.
    own = {"torchrun": {"GLOO_SOCKET_IFNAME": "eth0"}, "echelon launch": {"ECHELON_TOKEN": TOKEN}}[launcher]
    started = []
    for machine in (a, b):
        extra = []
        if launcher == "torchrun":
            extra = [f"--local-addr={machine.address}", f"--rdzv-conf=is_host={int(machine is a)}"]
        argv = [sys.executable, "-m", *module, *WORDS, f"{a.address}:29500", *extra, "script.py"]
        started.append(machine.start(argv, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", **own))
    ends = [network.finish(process) for process in started]
    assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
    assert "4 processes, trained True" in ends[0].out + ends[1].out
    assert a.processes() == b.processes() == []


@pytest.mark.slow
def test_two_agents_on_one_machine_train_and_a_failure_names_the_machine(command: Command) -> None:
    # The one run of several launchers in `make test`; the token is not needed on loopback, and ranks do not see it.
    port = command.free_port()
    command.write(
        "script.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print(int(total), os.environ['GROUP_RANK'], [name for name in os.environ if 'TOKEN' in name], flush=True)\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('bad sample 17')\n"
        "dist.barrier()\n",
    )
    flags = ["--cpu", "--nproc_per_node=1", "--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}"]
    secret = {"ECHELON_TOKEN": "a secret that nobody prints"}
    started = [command.start_launch(*flags, "script.py", **secret) for _ in range(2)]
    ends = [command.finish(process) for process in started]
    assert [end.code for end in ends] == [1, 1], ends[0].err
    assert sorted(line for end in ends for line in end.out.splitlines()) == ["2 0 []", "2 1 []"]
    for end in ends:
        assert re.search(r"echelon: rank 1 failed first: ValueError: bad sample 17\n  others: rank 0 ", end.err), (
            end.err
        )
        assert re.search(r"where: rank 1 of 2, on \S+ \(127.0.0.1\)\n +script.py:7 in <module>", end.err), end.err
        assert "a secret that nobody prints" not in end.err + end.out
