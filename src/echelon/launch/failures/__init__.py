"""From how the ranks ended to the first error of the run."""
