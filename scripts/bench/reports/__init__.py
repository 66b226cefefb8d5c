"""Runs as files, and what is shown of them: figures, Markdown, a page."""
