"""Start, monitor and stop the processes of one machine."""
