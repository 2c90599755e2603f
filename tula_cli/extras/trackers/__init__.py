"""The trackers included in tula, each based on its own package."""
