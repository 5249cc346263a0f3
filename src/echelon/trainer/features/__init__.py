"""Features that a training may use: NEFTune, search, hub, memory metrics and others."""
