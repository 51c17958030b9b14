"""What runs beside the user: the trainer, a run's folder, MLflow, the terminal."""
