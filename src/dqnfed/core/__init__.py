"""The contract between a problem, its clients' data, an algorithm and whatever runs them."""
