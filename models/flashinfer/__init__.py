"""Full and sliding-window attention through FlashInfer instead of `quire.kernels`."""
