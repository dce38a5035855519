"""Layers that are split along their width."""
