"""How data reach each process."""
