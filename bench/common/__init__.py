"""What several benchmarks share: rates of the machine, times, error bounds, workloads, traces,
worker processes.
"""
