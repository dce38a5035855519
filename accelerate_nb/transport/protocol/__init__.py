"""The messages between processes, and the channel that they travel over."""
