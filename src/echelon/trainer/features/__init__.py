"""Optional features: NEFTune, hyperparameter search, Hub uploads, memory metrics and others."""
