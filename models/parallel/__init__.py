"""One model on several devices: tensor parallel on torch.distributed.

Rank 0 has the engine. In each step it sends the arrays of the plan to the others, and all run the
model on their part of the weights and of the cache.

group        collectives of a step
shard        a rank's share of each weight; `models.loading.shards` reads it
channel      messages from rank 0 to the other hosts
steps        the messages of a step, and the loop of the other ranks
launch       processes that are ranks
worker       the program of a rank that is started here
heartbeat    notices and names a rank that dies, fails or is stuck
"""
