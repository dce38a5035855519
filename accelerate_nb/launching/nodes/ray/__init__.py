"""Agents on the nodes of a Ray cluster: the connection to it, what is reserved there, and the actor that serves on each node."""
