"""What the person at a notebook sees."""
