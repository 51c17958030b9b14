"""What fails, how it is noticed, and who tries again."""
