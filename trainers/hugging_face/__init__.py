"""Models that leave foldray for Hugging Face's transformers."""
