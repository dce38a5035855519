"""Where what is logged goes: the notebook's panel, and the packages that keep experiments."""
