"""Computed prefixes from one engine to another, through a store of objects that both reach.

``store`` is the protocol, of five methods, and what stores have in common; ``memory``, ``files``,
``mooncake_store`` and ``nixl_store`` are stores. ``objects`` says what an object is, and ``handoff``
puts and gets them for a cache. Needs numpy and nothing else, but for ``pool``, which copies the page
tensors of an engine, and for what a store is made of.
"""
