"""Pure functions on tensors and K-sized arrays: no state, no input or output, no randomness of their own."""
