"""Keys and values in blocks: allocation, the block table, reuse of prefixes, offload. Knows nothing of requests."""
