"""Decoding over several processes: tensor parallel, and prefill apart from decoding."""
