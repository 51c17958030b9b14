"""A training's state on disk: written in boxes of whole tensors, read without trust."""
