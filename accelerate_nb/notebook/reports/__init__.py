"""A run as a report that needs no kernel."""
