"""Paged attention, full and sliding-window."""
