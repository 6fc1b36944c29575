"""Shared parts of the benchmarks: rates of the machine, times, error bounds, workloads, traces,
worker processes.
"""
