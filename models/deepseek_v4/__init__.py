"""DeepSeek-V4: residual streams, compressed and sliding attention, experts and drafters.

In the order in which they are best read:

    config              shapes of a model, and the named ones; hf reads config.json
    model               the whole: embedding, layers, collapse of the streams, drafters
    layer               one layer: attention with its compressor and indexer, experts
    hyper_connections   how a layer reads from and writes to the residual streams
    rope, moe           rotary embedding; router, routed experts and the shared one
    cache               the tensors of pages and rings
    paged_attention     attention over these, through `quire.kernels`
    overlap             what a CSA layer needs besides where a sequence is resumed
    cache_plan          which bytes of which pages are whose
    unpaged_attention   the same in plain torch for one whole sequence, without any cache
    mtp, mtp_drafter    the layer that predicts the token after the next, and its drafts
    names               how checkpoints name and store weights; `models.loading` reads them
    memory              what the caches cost: ``python -m models.deepseek_v4.memory``
"""
