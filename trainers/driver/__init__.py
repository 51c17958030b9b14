"""What runs beside the user: the trainer, the command, runs that go on, and how a run is doing."""
