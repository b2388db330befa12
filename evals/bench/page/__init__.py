"""The page of `evals.report`: what is gathered, its sections, plots and cautions, and how it becomes HTML and Markdown.
Internal."""
