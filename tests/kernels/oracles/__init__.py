"""Oracles of the operators: one query and one key at a time, in plain torch: nothing of the kernels is shared."""
