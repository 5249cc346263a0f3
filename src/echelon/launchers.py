"""Provides the names in ``accelerate.launchers``, implemented by echelon."""

from echelon.launch.spawn import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
