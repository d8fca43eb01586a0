"""The drafter `history`: what was written before. Here are its sizes, which settings name without loading it."""

CAPACITY = 1 << 20  # tokens of one tenant: about 500 long conversations, in 36 MiB
LEAST = 64  # tokens: a smaller history holds no text worth copying
