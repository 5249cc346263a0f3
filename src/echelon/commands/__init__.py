"""The names of ``accelerate.commands``, so that its scripts run: re-exports only."""
