"""Training: the loop, its loss, optimisers, checkpoints and metrics. Knows nothing of inference."""
