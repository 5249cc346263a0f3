"""The world of a process: its rank, the number of processes, and the process group."""
