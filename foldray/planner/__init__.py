"""What a step will take, before it is run. No torch."""
