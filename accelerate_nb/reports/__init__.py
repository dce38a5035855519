"""A run in words and pictures, for whoever shows it: status lines while it goes on, and the report afterwards."""
