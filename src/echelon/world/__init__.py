"""A process's world: its rank, the number of processes, and the process group."""
