"""Copies of pages between the page tensors of a pool and rows of one buffer."""
