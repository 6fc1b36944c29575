"""Replay of request traces through the allocator, without a model."""
