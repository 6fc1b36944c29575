"""Norm, RoPE and paged write of latent rows."""
