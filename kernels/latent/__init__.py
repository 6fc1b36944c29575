"""Attention over latent rows, which are keys and values at once: MLA and DeepSeek-V4."""
