"""Settings and their origins."""
