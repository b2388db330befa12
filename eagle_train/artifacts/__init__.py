"""Drafts on disk: what reads, writes, converts, verifies and describes them. Knows nothing of training or decoding."""
