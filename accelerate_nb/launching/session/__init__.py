"""Sessions: workers that stay and run cells."""
