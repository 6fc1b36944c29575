"""One model on several devices: tensor parallel on torch.distributed.

Rank 0 has the engine. In each step it sends the arrays of the plan to the others, and all run the
model on their part of the weights and of the cache.
"""
