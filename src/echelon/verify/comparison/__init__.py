"""The parts of a comparison of two recorded runs."""
