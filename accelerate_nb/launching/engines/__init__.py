"""The engines: ways to start workers."""
