"""Hugging Face Accelerate's names that are values or small functions."""
