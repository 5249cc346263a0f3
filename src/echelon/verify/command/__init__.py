"""The parts of ``echelon verify``: it records a script on several layouts and compares each with one process."""
