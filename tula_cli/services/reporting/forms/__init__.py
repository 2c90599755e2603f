"""A report as text: Markdown, LaTeX, CSV."""
