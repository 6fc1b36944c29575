"""Host memory and disk behind a pool: where pages go, and who copies them."""
