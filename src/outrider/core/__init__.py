"""Values and pure functions: drafts, verdicts, laws, dice. Torch only; no I/O, no model, no thread."""
