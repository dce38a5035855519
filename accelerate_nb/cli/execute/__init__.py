"""`accelerate-nb launch --execute`: a notebook executed in a real kernel."""
