"""What is cached: the radix tree of segments and resume points, its keys, and what running requests
add to it."""
