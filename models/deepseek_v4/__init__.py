"""DeepSeek-V4: residual streams, compressed and sliding attention, experts and drafter layers.

``config`` has the shapes, ``hf`` reads config.json, ``names`` and ``storage`` say how checkpoints
name and store weights. ``model`` is the whole model, ``attention`` its attention over pages,
``cache`` the pages, ``mtp`` the drafts of its drafter layers.
"""
