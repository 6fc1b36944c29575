"""Manifold-constrained hyper-connections: collapse and expansion of residual streams."""
