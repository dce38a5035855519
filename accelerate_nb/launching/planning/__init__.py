"""Planning: which engine starts how many workers on which devices."""
