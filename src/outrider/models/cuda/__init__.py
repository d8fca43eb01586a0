"""Llama-like models on a GPU: pages of keys and values, kernels, and a pass that is one graph."""
