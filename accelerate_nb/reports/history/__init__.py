"""Runs beside each other: as a table, and compared."""
