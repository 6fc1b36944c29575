"""Prefix cache: the index of segments and resume points, and the requests that add to it."""
