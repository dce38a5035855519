"""Cells that run on every rank, seen from the notebook."""
