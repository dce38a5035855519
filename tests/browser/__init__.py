"""Tests in a browser: they share it, its servers and an open notebook, which end with this folder."""
