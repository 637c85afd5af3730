"""What keeps replies private: sums and products from one-time pads, Gaussian noise, and an account of what it costs."""
