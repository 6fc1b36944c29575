"""One model on several devices: tensor parallel.

group        the ranks, and their collectives
channel      messages between the hosts
shard        a rank's share of each weight; `models.loading.shards` reads it
vocabulary   rows by token id on several ranks
launch       processes that are ranks; worker is one that is started here
heartbeat    a rank that dies, fails or is stuck ends all of them
steps        the buffer of a step
lead         rank 0 sends steps
follow       the other ranks run them
"""
