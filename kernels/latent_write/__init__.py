"""The write of latent rows to pages, with norm and RoPE before it."""
