"""What Accelerate offers and this package doesn't yet: the names, with the same parameters."""
