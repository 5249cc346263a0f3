"""Building a run: settings, process group and engine from the arguments of ``Accelerator()``."""
