"""What keeps a run that is shown up to date."""
