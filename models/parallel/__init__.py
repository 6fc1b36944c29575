"""One model on several devices.

    group        the ranks, and all messages between them
    shard        what a rank holds of each weight; `models.loading.slices` reads it
    vocabulary   rows by token id on several ranks
    launch       processes that are ranks; worker is one that is started here
    watch        a rank that dies, fails or is stuck ends all of them
    lockstep     engines that make the same steps

Only tensor parallel exists. A cache that is dealt to ranks by block (context parallel) needs none of
these changed but `shard`, where it says which layers' entries are dealt: plans and page ids are the
same on all ranks already, and partial results of attention are merged between a layer's `Attend` and
its output projection, through a method of `group`.
"""
