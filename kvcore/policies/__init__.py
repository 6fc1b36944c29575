"""What is kept and what goes first: retention of resume points, and eviction."""
