"""The trackers that tula knows, each by its own package."""
