"""Builds a run's settings, process group and engine from the ``Accelerator()`` arguments."""
