"""Lets programs and libraries written for accelerate and transformers run on echelon unchanged."""
