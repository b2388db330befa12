"""What tests share. Knows nothing of any one test."""
