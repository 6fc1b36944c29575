"""Continuous batching: requests, steps, sampling, drafts, graphs, memory."""
