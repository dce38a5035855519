"""Hugging Face Accelerate's names that are values, or functions that other libraries call."""
