"""Measured figures in Markdown pages, written from ``bench/results``."""
