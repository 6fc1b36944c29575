"""The main benchmark: generation through allocator and kernels, checked, then timed."""
