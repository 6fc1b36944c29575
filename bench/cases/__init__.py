"""Cases that kernels are compared on: named shapes, their tensors, their results."""
