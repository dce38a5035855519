"""Estimates of the memory that a model takes, before anything is loaded."""
