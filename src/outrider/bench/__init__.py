"""`outrider bench`: workloads x engines x drafters, each against its own plain decoding."""
