"""Weights: found in checkpoints, checked, read."""
