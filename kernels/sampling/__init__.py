"""The next token of each row of logits: the largest, or a draw under temperature and filters."""
