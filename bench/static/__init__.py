"""Kernels compiled without a GPU: what the compiled code says."""
