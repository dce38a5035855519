"""Errors, stacks and hangs of workers as values and text."""
