"""Models that do not fit on one device: device maps, weights kept on the CPU or on disk, and the hooks that move them."""
