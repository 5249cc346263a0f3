"""Evaluation, prediction and metric reports of the Trainer."""
