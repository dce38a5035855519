"""Data for each process."""
