"""What keeps runs usable over the years, as a person sees it."""
