"""User scripts: section `script`, command lines with placeholders, and the recognition of existing command lines."""
