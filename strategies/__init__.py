"""What is tried: cases drawn from a kernel's claims, and the tensors that they describe."""
