"""The output for people; the only package that imports rich."""
