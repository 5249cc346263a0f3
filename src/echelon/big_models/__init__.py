"""Runs models that do not fit on one device: device maps, weights kept on the CPU or disk, and hooks that move them."""
