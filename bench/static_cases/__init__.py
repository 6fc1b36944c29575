"""The cases that ``bench.static`` compiles, one module a family of kernels."""
