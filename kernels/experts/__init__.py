"""Mixture of experts: the gated MLPs that tokens go to, as grouped products."""
