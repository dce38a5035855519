"""IPython's syntax (magics, shell lines, help) as plain Python."""
