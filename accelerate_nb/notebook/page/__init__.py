"""The page of the live panel: plain ES modules that a browser loads as they are, and their style sheet."""
