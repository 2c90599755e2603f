"""What a person sees; the only place that imports rich."""
