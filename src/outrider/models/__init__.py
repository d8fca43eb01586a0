"""Models run new tokens and forget refused ones."""
