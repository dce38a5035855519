"""Which numbers a step computes with."""
