"""The kernel side: how workers come to be."""
