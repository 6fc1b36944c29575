"""Cases that kernels are compared on: named shapes, their tensors, and what the results have to be."""
