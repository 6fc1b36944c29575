"""Benchmarks, each run as ``python -m bench.<name>``: a table on the screen, numbers in a file with
``--json``.
"""
