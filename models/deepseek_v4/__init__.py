"""DeepSeek-V4: residual streams, compressed and sliding attention, experts and drafter layers.

``config`` has the shapes; ``hf`` and ``names`` read config.json and checkpoints. ``model`` has the
layers, ``attention`` their attention over pages, ``cache`` the pages, ``mtp`` and ``dspark`` the two
drafters, ``chat`` the chat format.
"""
