"""`notebook_launcher(mixed_precision=...)` is passed to the Accelerator, and an error names a wrong value."""

import socket
from pathlib import Path

from accelerate import Accelerator, notebook_launcher
from show import show


def tell():
    accelerator = Accelerator()
    Path(f"{accelerator.num_processes}-{accelerator.process_index}").write_text(accelerator.mixed_precision)


with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = str(listener.getsockname()[1])
notebook_launcher(tell, num_processes=2, mixed_precision="bf16", use_port=port)
notebook_launcher(tell, num_processes=1, mixed_precision="bf16")
show("on two processes", [Path(f"2-{rank}").read_text() for rank in range(2)])
show("on one process", Path("1-0").read_text())
try:
    notebook_launcher(tell, num_processes=1, mixed_precision="bf17")
except Exception as error:
    show("a wrong value", type(error).__name__)
