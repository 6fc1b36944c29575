"""Operators around attention, a file each: checks, plain torch, kernel and launch."""
