"""The evaluation loop, prediction and metric reports."""
