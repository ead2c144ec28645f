"""What a bug is, and which failures are the same bug."""
