"""Start the processes of a run, watch them, explain how they ended."""
