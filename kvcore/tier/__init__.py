"""Tiers behind the page pool: host memory and disk for dense segments and whole resume points."""
