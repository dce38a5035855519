"""The text front end of a run in a terminal or a pipe."""
