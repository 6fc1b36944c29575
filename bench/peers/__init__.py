"""Implementations that are compared: quire's and those of others."""
