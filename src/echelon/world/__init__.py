"""Who am I among the processes of the run."""
