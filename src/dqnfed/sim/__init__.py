"""The simulator: one loop, several ways to run a cohort, everything on disk."""
