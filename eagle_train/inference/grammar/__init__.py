"""Grammars that an answer must obey, and the token masks that follow. Knows nothing of drafts or models."""
