"""What the code that is made of a kernel calls: arithmetic, memory, atomics and loops of all programs at once."""
