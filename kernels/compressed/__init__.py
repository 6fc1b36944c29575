"""DeepSeek-V4 attention: window, in-step rows and compressed entries under one softmax."""
