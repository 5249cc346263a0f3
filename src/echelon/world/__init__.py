"""Floor 1: who am I among the processes of the run."""
