"""Find the first error of a run from the ends of its ranks."""
