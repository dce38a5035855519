"""The user interface in a notebook."""
