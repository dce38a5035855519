"""The display of a run in a notebook: panel, text, saved report."""
