"""What evaluations share: their keys, models, questions, statistics and reports. No evaluation imports another."""
