"""The lightning indexer: the compressed entries that each query attends to."""
