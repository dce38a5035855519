"""The form that picks a configuration."""
