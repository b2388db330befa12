"""The frozen target, the draft, and the draft on disk. Knows nothing of training, inference or data."""
