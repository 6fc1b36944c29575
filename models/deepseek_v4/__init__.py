"""DeepSeek-V4: residual streams, compressed and sliding attention, experts and drafter layers.

``config`` has the shapes and reads config.json, ``checkpoint`` loads weights. ``model`` has the
layers, ``attention`` their attention over pages, ``cache`` the pages, ``drafters`` MTP and DSpark.
"""
