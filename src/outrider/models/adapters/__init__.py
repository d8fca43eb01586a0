"""Adapters (LoRA) as data: files, checks, merging, and the store that keeps them within a memory budget."""
