"""Start and monitor the processes of a run, and report how they end."""
