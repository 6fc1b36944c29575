"""Text models with layers of their own: Gemma, Llama, gpt-oss."""
