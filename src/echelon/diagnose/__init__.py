"""Diagnose stalls, stragglers and lost time from the records of the ranks. Starts no processes."""
