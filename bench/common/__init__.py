"""Shared by several benchmarks: rates of the machine, times, error bounds, workloads, traces,
worker processes.
"""
