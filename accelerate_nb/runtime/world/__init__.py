"""This rank's world: process groups and state."""
