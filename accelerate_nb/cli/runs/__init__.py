"""What `accelerate-nb runs` does with runs: finds them, shows their lines and reports, removes them."""
