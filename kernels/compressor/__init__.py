"""Gated pooling of tokens into compressed entries and index keys."""
