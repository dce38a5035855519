"""The precision of a step."""
