"""What is cached: the tree of segments and resume points, and what running requests add to it."""
