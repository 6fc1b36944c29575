"""The block tables of all groups, what steps do to them, and the forms that kernels read."""
