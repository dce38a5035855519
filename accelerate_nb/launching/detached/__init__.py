"""Detached runs: a process of their own conducts them, and any process of their user attaches to them."""
