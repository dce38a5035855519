"""Hugging Face Accelerate's configuration files."""
