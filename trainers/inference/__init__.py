"""Inference: a trained model in one process, which continues a text and scores texts."""
