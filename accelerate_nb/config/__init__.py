"""The configuration of a run: each setting is declared once."""
