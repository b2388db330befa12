"""Drafts without a model: texts in which the current one is looked up. Knows nothing of models, engines or tensors."""
