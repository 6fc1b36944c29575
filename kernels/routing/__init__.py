"""Mixture of experts: which experts a token goes to, and the sum of what they give."""
