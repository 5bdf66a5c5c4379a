"""The single-file example against the package."""
