"""Kernels side by side, and how long each should take."""
