"""The driver's code: the trainer, a run's folder, MLflow, the terminal."""
