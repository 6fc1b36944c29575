"""Families of models: `registry` says what one is; the others are a file each."""
