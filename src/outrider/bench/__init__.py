"""`outrider bench`: workloads x engines x drafters, measured so that nobody is flattered."""
