"""Re-exports the names of ``accelerate.launchers``."""

from echelon.launch.notebook import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
