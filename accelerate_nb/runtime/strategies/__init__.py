"""Strategies that spread a step over processes."""
