"""What a wrong kernel computes instead of attention: certificates, and the calls that they are made of."""
