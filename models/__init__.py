"""Models: Gemma text models on paged attention, their weights, and a continuous-batching runner.

The only package where the integers of ``kvcore`` and the tensors of ``kernels`` meet.
"""
