"""Sequences that are cut in parts, a part a process, and attention over all of them."""
