"""The stages of a decoding round as functions of tensors. Knows nothing of the scheduler or of texts."""
