"""The block tables of all groups: of prefill chunks, decode steps, steps with drafts and states,
and the forms that other kernels read."""
