"""Retention of resume points, and order of eviction."""
