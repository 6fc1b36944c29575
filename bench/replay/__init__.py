"""Replay of request traces through `quire.kvcore`: hit rates and times to the first token by retention, eviction and pool size."""
