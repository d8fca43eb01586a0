"""Text in, text out: our own engine, or vLLM with its own speculation."""
