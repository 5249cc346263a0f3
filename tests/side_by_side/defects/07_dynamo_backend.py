"""`launch --dynamo_backend` accepts every name that the library knows (upstream's flag misspells one)."""

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
refused = "invalid choice: 'torchxla_trace_once'" in done.stderr
show("launch", "starts" if "hello" in done.stdout else "refused as an invalid choice" if refused else done.stderr)
