"""Source code: cells, installed packages, lines of exported scripts."""
