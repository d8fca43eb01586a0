"""Interfaces of other libraries on top of our engine."""
