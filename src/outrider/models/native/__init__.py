"""Decoder layers in C++ for packed weights on a CPU, built on first use with the machine's own compiler."""
