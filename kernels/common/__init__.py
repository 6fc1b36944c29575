"""What several operators share: argument checks, launches and their cache, page formats, tiles, and
the ways to divide work."""
