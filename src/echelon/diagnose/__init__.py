"""Diagnoses stalls, stragglers and lost time from the ranks' records, without starting any processes."""
