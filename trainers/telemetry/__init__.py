"""What is told while training: records, metrics, and the history that they make up."""
