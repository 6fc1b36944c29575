"""One model on several devices: tensor parallel on torch.distributed.

Rank 0 has the engine and sends the arrays of each step's plan to the others. Each rank runs the
model on its part of the weights and of the cache.
"""
