"""Attention: each fast path with a plain torch twin. Knows nothing of models, caches or requests."""
