"""Norms of queries, keys and values by head, and RoPE."""
