"""The lightning indexer: which compressed entries a query attends to."""
