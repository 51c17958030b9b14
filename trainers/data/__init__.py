"""Documents → tokens → packed sequences on disk; reading by global index; byte baselines."""
