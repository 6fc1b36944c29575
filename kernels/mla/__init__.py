"""Latent attention: DeepSeek-V4 compressed attention with its cache, compressor and indexer, and DeepSeek-V2/V3 MLA."""
