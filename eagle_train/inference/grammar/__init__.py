"""Grammars that an answer must match, and the token masks that enforce them. Knows nothing of drafts or models."""
