"""Programs that measure; not part of the package."""
