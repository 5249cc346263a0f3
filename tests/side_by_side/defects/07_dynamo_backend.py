"""`launch --dynamo_backend` accepts each name that the library knows (upstream's flag has it misspelt)."""

import subprocess
import sys
from pathlib import Path

import accelerate as package
from accelerate.utils import DynamoBackend
from show import show

Path("hello.py").write_text("print('hello')\n")
command = [str(Path(sys.executable).with_name(package.__name__)), "launch", "--cpu", "--num_processes", "1"]
done = subprocess.run([*command, "--dynamo_backend", "torchxla_trace_once", "hello.py"], capture_output=True, text=True)
show("the library knows it", "TORCHXLA_TRACE_ONCE" in DynamoBackend)
show("launch", "starts" if "hello" in done.stdout else done.stderr.strip().splitlines()[-1].partition(" (choose")[0])
