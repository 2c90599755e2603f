"""A report as text: Markdown, LaTeX, CSV, and what sites ask for."""
