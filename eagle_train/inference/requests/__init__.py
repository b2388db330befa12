"""A request from its prompt to its text: preparation, scheduling, detokenisation.
Knows nothing of a round's tensors."""
