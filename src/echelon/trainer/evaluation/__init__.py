"""The Trainer's evaluation, prediction and metric reports."""
