"""DeepSeek-V4 attention: a window of raw rows, in-step rows and compressed entries under one softmax."""
