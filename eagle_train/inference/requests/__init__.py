"""Requests: preparing prompts, scheduling, prefill, detokenisation. Knows nothing of how tokens are proposed."""
