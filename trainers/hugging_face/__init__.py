"""Models of Hugging Face's transformers: what they are called there, and their weights as they come in."""
