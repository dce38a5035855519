"""A run in words and pictures, for whoever shows it: what to say while it goes on, and the report that is left of it."""
