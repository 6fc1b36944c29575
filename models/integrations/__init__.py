"""Bridges to other systems; each module needs a package of its own and says which."""
