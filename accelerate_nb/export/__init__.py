"""A notebook as a script."""
