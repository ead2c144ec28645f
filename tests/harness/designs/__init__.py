"""Which of the designs that are less precise than usual ones has errors like those of a result."""
