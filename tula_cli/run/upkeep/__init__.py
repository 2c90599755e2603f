"""What keeps a run usable over the years: its format, the tula that its jobs were submitted with, what may be freed of it."""
