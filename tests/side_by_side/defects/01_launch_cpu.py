"""`launch --cpu --num_processes 2` starts two processes."""

import subprocess
import sys
from pathlib import Path

import accelerate as package
from show import show

Path("who.py").write_text("print('here')\n")
command = str(Path(sys.executable).with_name(package.__name__))
done = subprocess.run([command, "launch", "--cpu", "--num_processes", "2", "who.py"], capture_output=True, text=True)
show("exit code", done.returncode)
show("processes", done.stdout.count("here"))
