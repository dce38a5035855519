"""Models that are larger than the memory they run in: made empty, placed on devices, loaded piece by piece."""
