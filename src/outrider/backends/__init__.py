"""Text in, text out, whoever speculates."""
