"""What export adds to a draft: calibration, a check of what was written, a model card."""
