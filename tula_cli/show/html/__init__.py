"""Report pages for a browser."""
