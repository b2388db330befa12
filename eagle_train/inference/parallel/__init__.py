"""Inference on several processes: tensor parallelism and disaggregated prefill."""
