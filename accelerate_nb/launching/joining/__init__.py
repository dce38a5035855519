"""Machines that join a notebook by a line pasted into their terminal: the listener, and the machine's own part."""
