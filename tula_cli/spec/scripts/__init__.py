"""A script of the user's own: section `script`, its command line with placeholders, and how that is found in what is typed today."""
