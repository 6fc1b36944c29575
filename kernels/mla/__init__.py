"""DeepSeek-V2 and V3 attention in its latent form (MLA)."""
