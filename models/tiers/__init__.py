"""Host memory behind a pool: where its pages are, and how they are copied."""
