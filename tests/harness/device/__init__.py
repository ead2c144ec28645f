"""What a kernel runs on: the device, its memory, and what a kernel needs of its environment."""
