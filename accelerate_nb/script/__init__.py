"""What an exported script calls while it runs: each file is imported by the scripts that need it."""
