"""Replay of request traces through `quire.kvcore` on a simulated clock."""
