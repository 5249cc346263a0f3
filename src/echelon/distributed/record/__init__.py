"""Each process's record of its training run, in the run's folder."""
