"""Where records go: the run's folder, MLflow, Prometheus and the terminal."""
