"""What happened: events, how they travel and what they add up to."""
