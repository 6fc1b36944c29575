"""Speed of the allocator."""
