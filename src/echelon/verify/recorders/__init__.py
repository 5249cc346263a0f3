"""The parts of a recording: each records one aspect of a run."""
