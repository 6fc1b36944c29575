"""Shared by several operators: argument checks, launches, page formats, tiles and split-KV."""
