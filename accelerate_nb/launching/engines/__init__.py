"""The ways to place workers."""
