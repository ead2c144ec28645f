"""What is true: attention in float64, and how far rounding may carry a kernel from it."""
