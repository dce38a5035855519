"""Trackers of logged values: the notebook's panel, and the packages that keep experiments."""
