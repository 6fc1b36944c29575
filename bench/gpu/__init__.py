"""Everything that needs a GPU, part by part (`bench.gpu.__main__`)."""
