"""Search over recipes."""
