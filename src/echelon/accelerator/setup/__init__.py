"""From the arguments of ``Accelerator()`` to settings, a process group and an engine."""
