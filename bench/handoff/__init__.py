"""Hands prefixes from one process to another: time, bytes, and the same output."""
