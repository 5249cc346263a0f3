"""Data loading: decides which samples each rank uses in each step."""
