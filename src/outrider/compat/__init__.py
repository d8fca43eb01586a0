"""Foreign interfaces, spoken on top of our engine."""
